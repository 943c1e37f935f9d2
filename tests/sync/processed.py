"""An engine of a page that processes its weights as real ones do, and a saboteur that loads a second time wrongly."""

import torch
from torch import nn

from torchrl_ext.landing.patcher import Patcher, compare, holds, read
from torchrl_ext.landing.placement import record
from torchrl_ext.proof.engine_loader import EngineLoader
from torchrl_ext.proof.runtime import reachable
from torchrl_ext.weights.digests import position_digest, tensor_digest
from torchrl_ext.weights.source import as_source

SIZE, EXPERTS = 8, 3


class Fused(nn.Module):
    """Three checkpoint tensors in one parameter, which is multiplied as it was loaded."""

    names = ("q", "k", "v")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * SIZE, SIZE), requires_grad=False)

    def raw(self):
        return {"weight": (3 * SIZE, SIZE)}

    def places(self, params):
        return {name: params["weight"][i * SIZE : (i + 1) * SIZE] for i, name in enumerate(self.names)}

    def process(self):
        return None

    def forward(self, x):
        return sum((x @ self.weight.T).split(SIZE, -1)) / 3


class Shuffled(Fused):
    """Experts in an order of the kernel's own: equal shape, other places."""

    names = tuple(f"experts.{e}" for e in range(EXPERTS))
    order = torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, SIZE, SIZE), requires_grad=False)

    def raw(self):
        return {"weight": (EXPERTS, SIZE, SIZE)}

    def places(self, params):
        return {name: params["weight"][i] for i, name in enumerate(self.names)}

    def process(self):
        self.weight.data = self.weight.data[:, :, self.order]

    def forward(self, x):
        return torch.einsum("bi,eoi->bo", x[:, self.order], self.weight) / EXPERTS


class Packed(Fused):
    """A weight that is given up for a copy that only the multiplying function holds."""

    names = ("down",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE), requires_grad=False)
        self.multiply = None

    def raw(self):
        return {"weight": (SIZE, SIZE)}

    def places(self, params):
        return {"down": params["weight"]}

    def process(self):
        packed = self.weight.data.T.contiguous()
        self.multiply = lambda x: x @ packed
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x):
        return self.multiply(x)


class Absorbed(Fused):
    """A weight that stays, beside a product of it that is multiplied in its place."""

    names = ("kv",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE), requires_grad=False)
        self.absorbed = None

    def raw(self):
        return {"weight": (SIZE, SIZE)}

    def places(self, params):
        return {"kv": params["weight"]}

    def process(self):
        self.absorbed = 0.25 * self.weight.data.T.contiguous()

    def forward(self, x):
        return x @ self.absorbed


KINDS = (Fused, Shuffled, Packed, Absorbed)


class Model(nn.Module):
    """Two blocks of one layer of each kind, a norm, and a table that nothing loads."""

    def __init__(self, norm=torch.float32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({kind.__name__: kind() for kind in KINDS}) for _ in range(2))
        self.norm = nn.Parameter(torch.empty(SIZE, dtype=norm), requires_grad=False)
        self.register_buffer("cos_sin_cache", torch.randn(16, SIZE), persistent=False)

    def forward(self, x):
        for block in self.blocks:
            for layer in block.values():
                x = x + torch.tanh(layer(x))
        return x * self.norm

    def layers(self):
        """Path and layer, in order."""
        for i, block in enumerate(self.blocks):
            for kind, layer in block.items():
                yield f"blocks.{i}.{kind}", layer


def checkpoint(seed):
    """Random weights by name."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"{path}.{name}" for path, layer in Model().layers() for name in layer.names]
    found = {name: torch.randn(SIZE, SIZE, generator=generator) for name in names}
    return found | {"norm": torch.ones(SIZE) if seed == 0 else torch.rand(SIZE, generator=generator) + 0.5}


def outputs(weights):
    """What a cold start from these weights answers."""
    return ProcessedLoader(weights).model(PROBE)


PROBE = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(99))


class ProcessedLoader(EngineLoader):
    """Loads into `Model`, and processes each layer; written as the loaders of real engines are.

    Args:
        weights: what it is started with.
        sabotage: `Sabotage`, or None for a loader that is sound.
        lacks: names of layer kinds whose processing the engine's own reload leaves out.
        knows: those of them that a repair processes.
        careless: take a weight for one that can be written in place although a product of it is multiplied.
    """

    def __init__(self, weights, sabotage=None, lacks=(), knows=(), careless=False):
        self.lacks, self._knows, self._careless = frozenset(lacks), tuple(knows), careless
        super().__init__()
        self.model, self._start, self.sabotage = Model(weights["norm"].dtype), weights, None
        self._params, self._placement, self._whole = (), None, []
        self._pieces, self._patcher, self._whole_model, self._done = {}, Patcher({}), False, {}
        self._digests, self._loading = {}, False
        self.check(as_source(weights).params())
        self._open(first=True)
        self._write(weights.items())
        self._close(first=True)
        self.touched, self.sabotage, self._params = False, sabotage, ()

    # loading

    def _open(self, first=False):
        for _, layer in self.model.layers():
            for name, shape in layer.raw().items():
                if getattr(layer, name).numel() == 0 or first:
                    setattr(layer, name, nn.Parameter(torch.empty(shape), requires_grad=False))

    def _targets(self, stand_ins=False):
        def raw(layer):
            if stand_ins:
                return {name: torch.empty(shape, device="meta") for name, shape in layer.raw().items()}
            return {name: getattr(layer, name).data for name in layer.raw()}

        params = {path: raw(layer) for path, layer in self.model.layers()}
        norm = torch.empty_like(self.model.norm, device="meta") if stand_ins else self.model.norm.data
        places = {"norm": norm}
        for path, layer in self.model.layers():
            places |= {f"{path}.{name}": place for name, place in layer.places(params[path]).items()}
        flat = {f"{path}.{name}": tensor for path, own in params.items() for name, tensor in own.items()}
        return places, flat | {"norm": norm}

    def _write(self, pairs, places=None):
        places = self._targets()[0] if places is None else places
        for name, tensor in pairs:
            if self.sabotage is not None and places[name].device.type != "meta":
                name, tensor = self.sabotage.loaded(name, tensor)
                if name is None:
                    continue
            places[name].copy_(tensor)

    def _close(self, first=False):
        for path, layer in self.model.layers():
            kind = type(layer).__name__
            stale = self.sabotage is not None and self.sabotage.stale(path)
            if first or (kind not in self.lacks and not stale) or (kind in self.repairs and not stale):
                layer.process()
                if not first and kind in self.lacks:
                    self._done[path] = kind

    # as engines do

    def check(self, params):
        params = tuple(params)
        if params == self._params:
            return
        places, targets = self._targets(stand_ins=True)
        self._params, self._placement = params, record(lambda pairs: self._write(pairs, places), params, targets)
        live = dict(self.model.named_parameters())
        found = {}
        for meta in params:
            landings = self._placement.landings[meta.name]
            derived = meta.dtype.is_complex or (".kv" in meta.name and not self._careless)
            if all(live[one.param].shape == targets[one.param].shape for one in landings) and not derived:
                found[meta.name] = [one.piece(live[one.param]) for one in landings]
        agreed = {name for name in found if holds(found[name], self._start[name])} if not self.touched else set()
        self._pieces = {name: pieces for name, pieces in found.items() if name in agreed}
        self._patcher = Patcher(self._pieces)

    def start(self):
        self.touched, self._done, self._digests, self._loading = True, {}, {}, True
        self._patcher.forget()
        self._open()

    def load(self, pairs):
        pairs = dict(pairs)
        self._digests = {name: tensor_digest(tensor) for name, tensor in pairs.items()}
        self._late = {name: tensor for name, tensor in pairs.items() if ".Fused." in name}  # as vLLM's padded layers
        self._write((name, tensor) for name, tensor in pairs.items() if name not in self._late)

    def finish(self):
        if self._loading:
            self._write(self._late.items())
            self._close()
        self._loading = False

    def slices(self):
        return {}

    def whole(self):
        return {}

    def patchable(self, name):
        return name in self._patcher.pieces

    def position_digests(self, digest):
        return {name: position_digest(tensor, digest).hex() for name, tensor in self._start.items()}

    def stage(self, changes):
        self._patcher.stage(changes)
        others = [meta.name for meta in self._params if not self.patchable(meta.name)]
        self._whole = list(changes.whole([meta.name for meta in self._params] if self._whole_model else others))
        compare({name: position_digest(tensor, changes.digest) for name, tensor in self._whole}, changes.digests)

    def commit(self):
        self.touched, self._done, self._digests = True, {}, {}
        self._patcher.commit()
        if self.sabotage is not None:
            self.sabotage.committed(self.model)
        whole, self._whole = self._whole, []
        if whole:
            loaded = {name.rpartition(".")[0].removesuffix(".experts") for name, _ in whole}
            self._open()
            self._write(whole)
            for path, layer in self.model.layers():
                stale = self.sabotage is not None and self.sabotage.stale(path)
                if path in loaded and not stale:
                    layer.process()

    def digests(self):
        metas = {meta.name: meta for meta in self._params if meta.name in self._pieces}
        return self._digests | {name: tensor_digest(read(meta, self._pieces[name])) for name, meta in metas.items()}

    # as a rehearsal asks

    def known_repairs(self):
        return self._knows

    def repaired(self):
        return {path: f"{kind}.process" for path, kind in self._done.items()}

    def start_weights(self):
        return None if self._start is None else iter(self._start.items())

    def ready(self):
        self.check(as_source(self._start).params())

    def runtime(self):
        return reachable(self.model)

    def landings(self, name):
        return self._placement.landings[name]

    def kernel(self, layer):
        return type(self.model.get_submodule(layer)).__name__

    def land_whole(self):
        self._pieces, self._whole_model = {}, True
        self._patcher = Patcher({})

    def rehearse(self):
        try:
            return super().rehearse()
        finally:
            self.touched = False


class Sabotage:
    """One wrong thing, about one tensor, whenever the engine loads after its start; both are chosen by a seed."""

    WAYS = ("drop", "swap", "transpose", "part", "stale", "shift", "misplace")

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def pick(options):
            return options[int(torch.randint(len(options), (), generator=generator))]

        self.way = pick(self.WAYS)
        names = [name for name in checkpoint(0) if name != "norm"]
        self.name, self.other = pick(names), pick(names)
        while self.other == self.name:
            self.other = pick(names)
        self.path = pick([path for path, layer in Model().layers() if type(layer) in (Packed, Absorbed, Shuffled)])
        self._held = {}

    def loaded(self, name, tensor):
        if name == self.name and self.way in ("drop", "transpose", "part", "shift"):
            part = torch.cat([tensor[: SIZE // 2], torch.zeros_like(tensor[SIZE // 2 :])])
            turned = {"transpose": tensor.T, "part": part, "shift": tensor.roll(1, 0)}
            return (None, None) if self.way == "drop" else (name, turned[self.way])
        swapped = {self.name: self.other, self.other: self.name}
        return (swapped.get(name, name), tensor) if self.way == "swap" else (name, tensor)

    def stale(self, path):
        return self.way == "stale" and path == self.path

    def committed(self, model):
        if self.way == "misplace":
            weight = model.blocks[0]["Fused"].weight.data
            weight[0], weight[1] = weight[1].clone(), weight[0].clone()

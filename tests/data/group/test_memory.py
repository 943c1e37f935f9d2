"""Segments of shared memory, and the handles by which other processes map them."""

import json
import os
from contextlib import closing, suppress

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import randoms

from tests.hostile import worse_json
from tests.processes import calling, files_of, maps_of, python
from torchrl_ext.base.errors import TransportError, WeightSyncError
from torchrl_ext.data.group import memory
from torchrl_ext.data.group.memory import HOST, DeviceHandle, HostHandle, create

NOBODY = 65534


def plain(handle):
    """A handle as the JSON object that travels."""
    return json.loads(json.dumps(handle.to_json()))


class TestOnTheHost:
    def test_host_segment_is_shared_by_json_and_cannot_be_truncated(self):
        own = create(HOST, 8192)
        other = HostHandle.from_json(plain(own.handle)).attach()
        own.flat[5000:5003] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        assert other.flat[5000:5003].tolist() == [1, 2, 3]
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{own.handle.fd}", 0)
        for segment in (own, other):
            segment.close()
            segment.close()

    def test_a_forked_child_keeps_nothing_of_its_parent_alive(self):
        with closing(create(HOST, 8192)) as own, closing(own.handle.attach()):
            pid = os.fork()
            if pid == 0:
                held = [*files_of(os.getpid()), maps_of(os.getpid())]
                os._exit("memfd:torchrl_ext" in "".join(held))
            assert os.waitpid(pid, 0)[1] == 0
            assert "memfd:torchrl_ext" in maps_of(os.getpid())

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_another_user_is_refused_with_the_reason(self):
        with closing(create(HOST, 8192)) as own:
            assert "belongs to another user" in python(calling(attaches_as_nobody, own.handle.to_json()))

    def test_a_file_that_is_not_sealed_memory_is_refused(self, tmp_path):
        (tmp_path / "file").write_bytes(bytes(128))
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.truncate(unsealed, 128)
        with open(tmp_path / "file", "rb+") as file, os.fdopen(unsealed) as memory:
            for one in (file, memory):
                found = os.fstat(one.fileno())
                inode = (found.st_dev, found.st_ino)
                with pytest.raises(WeightSyncError, match="is not sealed"):
                    HostHandle(pid=os.getpid(), fd=one.fileno(), inode=inode, nbytes=128).attach()

    @given(randoms(use_true_random=False))
    def test_any_handle_is_an_error_or_what_it_says(self, draw):
        with closing(create(HOST, 8192)) as segment:
            before = len(os.listdir("/proc/self/fd"))
            with suppress(WeightSyncError):
                HostHandle.from_json(worse_json(plain(segment.handle), draw)).attach().close()
            assert len(os.listdir("/proc/self/fd")) <= before  # threads of other tests may still close theirs


def attaches_as_nobody(handle):
    os.setuid(NOBODY)
    try:
        HostHandle.from_json(handle).attach()
    except TransportError as error:
        print(error)


class TestOnADevice:
    """Torch's sharing is played by its arguments, so that a machine without a GPU tells too."""

    SHARED = (b"handle", 8192, 512, False, b"counter", 3, b"event", True)

    @pytest.fixture
    def played(self, monkeypatch):
        rebuilt, empty = [], torch.empty
        monkeypatch.setattr(memory, "accelerator", lambda: "cuda")
        monkeypatch.setattr(memory, "uuids", lambda: ["GPU-0"])
        monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: empty(*size, **how))
        monkeypatch.setattr(memory, "reduce_tensor", lambda flat: (None, (None, *self.SHARED)))
        monkeypatch.setattr(memory, "rebuild_cuda_tensor", lambda *given: rebuilt.append(given) or empty(8192))
        return rebuilt

    def test_cuda_handle_is_rebuilt_in_another_process_only(self, played):
        own = create("GPU-0", 8192)
        handle = DeviceHandle.from_json(plain(own.handle))
        assert handle.attach().flat is own.flat and not played
        msgspec.structs.replace(handle, key="another process's").attach()
        assert played[0][7:] == self.SHARED

        handle = msgspec.structs.replace(handle, key="another's", device="GPU-7")  # which is not seen here
        with pytest.raises(TransportError, match="memory on GPU-7 cannot be mapped here"):
            handle.attach()

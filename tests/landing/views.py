"""Views of a tensor of 8 rows and 6 columns, of every kind that loaders take."""

import torch


def made(shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).to(dtype).reshape(shape)


VIEWS = {
    "itself": lambda one: one,
    "data": lambda one: one.data,
    "detached": lambda one: one.detach(),
    "rows": lambda one: one.narrow(0, 2, 3),
    "columns": lambda one: one.narrow(1, 1, 4),
    "a box": lambda one: one[1:5, 2:4],
    "every other row": lambda one: one[::2],
    "transposed": lambda one: one.t(),
    "transposed, then rows": lambda one: one.t()[1:3],
    "one row": lambda one: one[3],
    "one column": lambda one: one[:, 3],
    "one element": lambda one: one[3, 3],
    "heads": lambda one: one.view(4, 2, 6),
    "a few heads": lambda one: one.view(4, 2, 6)[1:3],
    "heads turned": lambda one: one.view(4, 2, 6).permute(1, 0, 2),
    "columns of heads": lambda one: one.view(8, 2, 3)[:, 1],
    "flat": lambda one: one.view(-1),
    "flat rows": lambda one: one.view(-1)[12:36],
    "flat across rows": lambda one: one.view(-1)[7:31],
    "flat in steps": lambda one: one.view(-1)[5:40:5],
    "flat pairs": lambda one: one.view(-1, 2)[3:9],
    "rows in pairs": lambda one: one.view(4, 12)[1:3, 3:9],
    "flattened columns": lambda one: one[:, 2:4].reshape(-1),
    "chunk": lambda one: one.chunk(3, 1)[1],
    "split": lambda one: one.split([3, 5])[1],
    "unbound": lambda one: one.unbind(0)[6],
    "unsqueezed": lambda one: one.unsqueeze(0).unsqueeze(-1)[:, 2:4],
    "squeezed": lambda one: one[4:5].squeeze(0),
    "expanded": lambda one: one[4:5].expand(3, 6),
    "diagonal": lambda one: one.diagonal(),
    "strided": lambda one: one.as_strided((2, 3), (7, 5), 4),
    "empty": lambda one: one[3:3],
}

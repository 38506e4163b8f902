"""How a parameter is seen as logical matrices ``[B, m, n]``: rows are outputs, columns inputs, as in ``x @ W.T``.

transformers fuses experts: ``gate_up_proj [E, 2I, D]`` is 2E matrices ``[I, D]`` (gate rows first) and ``down_proj``
``[E, D, I]`` is E; some families store the transpose (``is_transposed``) or interleave gate and up
(``is_concatenated=False``). Normalising across the expert axis or a gate/up pair is a bug: every update uses a layout.

MESH-B's blocks are hidden neurons: rows of w1 and w3 ``[I, D]``, columns of w2 ``[D, I]``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import UserError
from ..models.experts import ExpertTensor


@dataclass(frozen=True)
class Layout:
    """The matrices inside a parameter ``[E, a, b]``, ``[a, b]`` or (``batch``) ``[E*a, b]``.

    Args:
        parts: 2 where gate and up are fused along the output axis.
        transposed: stored ``[.., inputs, outputs]``.
        interleaved: output rows alternate gate, up, gate, up.
        axis: where MESH-B's blocks lie: ``rows`` (w1, w3, any plain matrix) or ``columns`` (w2).
        batch: E of a 2-D parameter ``[E*a, b]``, or 1; ``None`` takes the leading axes of a 3-D one as the batch.
        flatten: a parameter of three or more axes that is one matrix ``[out, rest]`` (a convolution).
    """

    parts: int = 1
    transposed: bool = False
    interleaved: bool = False
    axis: str = "rows"
    batch: int = 1
    flatten: bool = True

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Views ``[B, m, n]`` of a parameter, of its gradient, or of one number a row (``n = 1``).

        Raises UserError for a fused pair with an odd number of rows, RuntimeError for strides that allow no view.
        """
        x = self._batched(tensor)
        if self.transposed:
            x = x.transpose(1, 2)
        if self.parts == 1:
            return [x]
        rows = x.shape[1]
        if rows % 2:
            raise UserError(f"a fused gate/up tensor {list(tensor.shape)} has {rows} output rows: must be even")
        if self.interleaved:
            return [x[:, 0::2], x[:, 1::2]]
        if self.transposed:
            return [x[:, : rows // 2], x[:, rows // 2 :]]
        return [x.view(-1, rows // 2, x.shape[2])]

    def _batched(self, tensor: Tensor) -> Tensor:
        if tensor.ndim == 2:
            return tensor.view(self.batch, -1, tensor.shape[1]) if self.batch > 1 else tensor.unsqueeze(0)
        if self.flatten:
            return tensor.view(1, tensor.shape[0], -1)
        return tensor if tensor.ndim == 3 else tensor.flatten(0, -3)

    def statistic_shape(self, shape: Sequence[int], axis: str) -> tuple[int, ...]:
        """Shape of one number a row (column) of every logical matrix of a parameter of ``shape``.

        It broadcasts to the parameter (``[E, 2I, 1]``, ``[E, 1, I]``, ``[I, 1]``, ...), except for the columns of a
        fused pair, which two matrices share: ``[E, 2, 1, n]``.
        """
        rows, columns = (shape[-1], shape[-2]) if self.transposed else (shape[-2], shape[-1])
        if axis == "columns" and self.parts == 2:
            return (shape[0] if len(shape) > 2 else self.batch, 2, 1, columns)
        if len(shape) > 2 and self.flatten:
            return (shape[0], *(1 for _ in shape[1:])) if axis == "rows" else (1, *shape[1:])
        if len(shape) == 2 and axis == "columns" and self.batch > 1:
            return (self.batch, 1, columns)
        one = (rows, 1) if axis == "rows" else (1, columns)
        return (*shape[:-2], *(reversed(one) if self.transposed else one))

    def statistic_views(self, statistic: Tensor, axis: str) -> list[Tensor]:
        """Views ``[B, rows]`` or ``[B, columns]`` of such a statistic, one for each of :meth:`views`."""
        if axis == "columns" and self.parts == 2:
            if self.transposed or self.interleaved:
                return [statistic[:, 0, 0], statistic[:, 1, 0]]
            return [statistic.flatten(0, 2)]
        if axis == "columns" and statistic.ndim == 3 and self.batch > 1:
            return [statistic.squeeze(1)]
        return [view.squeeze(2 if axis == "rows" else 1) for view in self.views(statistic)]


# ---- experts --------------------------------------------------------------------------------------------------------


def expert_layouts(model: nn.Module, tensors: Sequence[ExpertTensor]) -> list[Layout | None]:
    """The layout of each expert tensor, ``None`` for expert biases.

    Modules that honour ``ExpertsInterface`` say it themselves: its attributes ``gate_up_proj``, ``up_proj``,
    ``down_proj`` and the flags ``is_transposed`` and ``is_concatenated``. Others are inferred from the shapes of the
    module's tensors (of the block's, where each tensor has a module of its own): see :func:`_inferred`.
    """
    modules = dict(model.named_modules())
    groups: dict[str, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.module_name].append(index)
    lone = [path for path, members in groups.items() if len(members) == 1]
    for path in lone:
        groups[path.rpartition(".")[0] + " "].extend(groups.pop(path))
    width = _embedding_width(model)
    layouts: list[Layout | None] = [None] * len(tensors)
    for members in groups.values():
        module = modules[tensors[members[0]].module_name]
        for index in members:
            if "is_transposed" in vars(module):
                layouts[index] = _declared(module, tensors[index])
        rest = [i for i in members if "is_transposed" not in vars(modules[tensors[i].module_name])]
        for index, layout in zip(rest, _inferred([tensors[i] for i in rest], width)):
            layouts[index] = layout
    return layouts


def _declared(module: nn.Module, tensor: ExpertTensor) -> Layout | None:
    if tensor.parameter.ndim < 3:
        return None
    attribute = tensor.name.rpartition(".")[2]
    fused = attribute == "gate_up_proj"
    return Layout(
        parts=2 if fused else 1,
        transposed=module.is_transposed,
        interleaved=fused and not module.is_concatenated,
        axis="columns" if attribute == "down_proj" else "rows",
        flatten=False,
    )


def _embedding_width(model: nn.Module) -> int | None:
    try:
        return model.get_input_embeddings().weight.shape[1]
    except (AttributeError, NotImplementedError):
        return None


def _inferred(tensors: Sequence[ExpertTensor], width: int | None) -> list[Layout | None]:
    """Layouts of undecorated expert tensors from their shapes ``[E, a, b]`` (or ``[E*a, b]``).

    A fused pair: ``[E, 2I, D]`` with ``[E, D, I]``, or transposed ``[E, D, 2I]`` with ``[E, I, D]``: the shapes decide,
    gate rows come first (llama4, jetmoe, longcat). Unfused: the hidden size tells which axis is D; with all tensors
    ``[E, I, D]`` (dbrx) the rows are the neurons of each. Where nothing decides: a plain matrix, blocks on its rows.
    """
    shapes = []
    for t in tensors:
        p = t.parameter
        shapes.append(tuple(p.shape[1:]) if p.ndim == 3 else (p.shape[0] // t.num_experts, p.shape[1]))
    layouts: list[Layout | None] = []
    for t, shape in zip(tensors, shapes):
        if len(shape) != 2:
            layouts.append(Layout(flatten=False))
            continue
        a, b = shape
        others = [s for s in shapes if s != shape]
        base = {"batch": t.num_experts if t.parameter.ndim == 2 else 1, "flatten": False}
        if (b, a // 2) in others and a % 2 == 0:
            layouts.append(Layout(parts=2, **base))
        elif (b // 2, a) in others and b % 2 == 0:
            layouts.append(Layout(parts=2, transposed=True, **base))
        elif (2 * b, a) in others:
            layouts.append(Layout(axis="columns", **base))
        elif (b, 2 * a) in others:
            layouts.append(Layout(axis="columns", transposed=True, **base))
        else:
            layouts.append(Layout(axis="columns" if width == a != b else "rows", **base))
    return layouts


# ---- MLPs -----------------------------------------------------------------------------------------------------------


def mlp_layouts(module: nn.Module) -> dict[str, Layout] | None:
    """Layouts by parameter name if the module's matrices are those of one MLP, else ``None``.

    An MLP has exactly one matrix ``[D, I]`` and either one or two ``[I, D]`` or one fused ``[2I, D]``; all may share
    leading axes. Vectors (biases, norms) are ignored.
    """
    matrices = {n: p for n, p in module.named_parameters() if p.ndim >= 2 and min(p.shape[-2:]) > 1}
    if not 2 <= len(matrices) <= 3 or len({p.shape[:-2] for p in matrices.values()}) != 1:
        return None
    for down, p in matrices.items():
        d, i = p.shape[-2:]
        inputs = {name: q for name, q in matrices.items() if name != down}
        if len(inputs) == 1 and all(tuple(q.shape[-2:]) == (2 * i, d) for q in inputs.values()):
            return {down: Layout(axis="columns", flatten=False)} | {n: Layout(parts=2, flatten=False) for n in inputs}
        # Without a gate, or with square matrices, the shapes leave the order open: every family lists the output last.
        last = down == list(matrices)[-1] or (len(inputs) == 2 and d != i)
        if last and all(tuple(q.shape[-2:]) == (i, d) for q in inputs.values()):
            return {down: Layout(axis="columns", flatten=False)} | {n: Layout(flatten=False) for n in inputs}
    return None

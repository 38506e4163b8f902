"""``optimizer.state``: a mapping from parameters to the inner optimizers' own states; changing it has effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

from torch.nn import Parameter

from ..errors import UserError
from .inner import HookedTensor, Inner
from .state import merge, place, split


class StackedState(dict):
    """The state of a tensor that is updated expert by expert: E states stacked to copies, so not to be written to."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(
            "this state is stacked from one an expert, and a change would be lost: assign the whole of it "
            "(optimizer.state[p] = {...}) or use load_state_dict()"
        )

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse  # type: ignore[assignment]


class StateView(MutableMapping):
    """What ``torch.optim.Optimizer.state`` is elsewhere. Keys: the owned parameters that have state.

    ``state[p]`` is the inner optimizer's own dict (a :class:`StackedState` where it has one an expert). Assigning and
    deleting reach the inner optimizers. KeyError for a parameter that is not owned.
    """

    def __init__(self, owned: Sequence[Any], units: Sequence[HookedTensor], end: Sequence[Inner]) -> None:
        self._owned = owned
        self._stacked = {id(u.parameter): u for u in units if u.views}
        self._whole = {id(p): inner for u in units if not u.views for inner in u.inners for _, p in inner.named}
        self._whole |= {id(p): inner for inner in end for _, p in inner.named}

    def _states(self, parameter: Parameter) -> list[dict[str, Any]]:
        if (unit := self._stacked.get(id(parameter))) is not None:
            return [inner.optimizer.state.get(p, {}) for inner in unit.inners for _, p in inner.named]
        if id(parameter) not in self._whole:
            raise KeyError(f"a parameter of shape {list(getattr(parameter, 'shape', []))} that is not owned")
        return [self._whole[id(parameter)].optimizer.state.get(parameter, {})]

    def __contains__(self, parameter: Any) -> bool:
        return (id(parameter) in self._stacked or id(parameter) in self._whole) and any(self._states(parameter))

    def __iter__(self) -> Iterator[Parameter]:
        return iter([o.parameter for o in self._owned if any(self._states(o.parameter))])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, parameter: Parameter) -> dict[str, Any]:
        states = self._states(parameter)
        if (unit := self._stacked.get(id(parameter))) is not None:
            return StackedState(merge(states, parameter, unit.name))
        return self._whole[id(parameter)].optimizer.state[parameter]

    def __setitem__(self, parameter: Parameter, value: Mapping[str, Any]) -> None:
        self._states(parameter)
        if not isinstance(value, Mapping):
            raise UserError(f"optimizer.state[p] = {type(value).__name__}: a state is a dict")
        if (unit := self._stacked.get(id(parameter))) is None:
            self._whole[id(parameter)].optimizer.state[parameter] = dict(value)
            return
        for inner, view, piece in zip(
            unit.inners, unit.views, split(dict(value), parameter, len(unit.views), unit.name)
        ):
            on_device = bool(inner.optimizer.param_groups[0].get("fused"))
            inner.optimizer.state[view] = place(piece, view, on_device)

    def __delitem__(self, parameter: Parameter) -> None:
        if not any(self._states(parameter)):
            raise KeyError("this parameter has no state")
        if (unit := self._stacked.get(id(parameter))) is not None:
            for inner, view in zip(unit.inners, unit.views):
                inner.optimizer.state.pop(view, None)
        else:
            self._whole[id(parameter)].optimizer.state.pop(parameter, None)

    def replace(self, value: Any) -> None:
        """Make ``value`` the whole state. Raises UserError and changes nothing if it is no mapping of owned tensors."""
        if not isinstance(value, Mapping):
            raise UserError(f"optimizer.state = {type(value).__name__}: a mapping from parameters to states is wanted")
        new = dict(value)
        for parameter, state in new.items():
            try:
                self._states(parameter)
            except KeyError as error:
                raise UserError(f"optimizer.state = ...: {error.args[0]}; load_state_dict() goes by name") from None
            if not isinstance(state, Mapping):
                raise UserError(f"optimizer.state = ...: the state of one parameter is a {type(state).__name__}")
        self.clear()
        self.update(new)

    def clear(self) -> None:
        for parameter in list(self):
            del self[parameter]

    def __repr__(self) -> str:
        return repr(dict(self))

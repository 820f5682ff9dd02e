"""Numbers among a model's inputs that are others at each call: what its forward asks of them.

A loop that counts its batches (``training_step(batch, batch_idx)``) gives a number that its forward mostly
does not look at, or asks whether it is a multiple of ten. While the model is traced something stands for
such a number that notes what is asked; another number of which the same is heard needs no trace of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Self

from espalier.parallel.pipeline.arguments import leaves
from espalier.parallel.pipeline.model_stand_ins import unlike
from espalier.parallel.pipeline.record import Trace

KINDS = (int, float)  # and not bool, of which there are but two
Make = Callable[[Sequence[Any]], Any]


def numbers_in(batch: Any) -> list[Any]:
    """Those among a model's inputs."""
    return [x for x in leaves(batch) if type(x) in KINDS]


class Questions:
    """What a forward has asked of the numbers that it was given."""

    def __init__(self) -> None:
        self._asked: list[tuple[Make, Hashable]] = []
        self._given = 0

    def stand(self, x: Any) -> Any:
        """What stands for a number; other inputs as they are."""
        if type(x) not in KINDS:
            return x
        place, self._given = self._given, self._given + 1
        return Number(x, lambda numbers: numbers[place], self)

    def note(self, make: Make, answer: Any) -> None:
        """Something is asked of what is made of the numbers."""
        self._asked.append((make, answer))

    def answers(self) -> tuple[Hashable, ...]:
        """What was heard, in order."""
        return tuple(answer for _, answer in self._asked)

    def hear_the_same(self, numbers: Sequence[Any]) -> bool:
        """Whether the same is heard of others, of the same kinds."""
        try:
            return all(_same(make(numbers), answer) for make, answer in self._asked)
        except Exception:  # a division by zero, say
            return False

    def are_all(self, traced: Trace, as_given: Trace) -> bool:
        """Whether nothing else of the numbers has been looked at in a trace.

        Args:
            as_given: a trace with the numbers themselves: code may tell them by ``type(x) is int``.
        """
        ops = [(op.args, op.kwargs, op.out) for op in traced.ops]
        calls = [(call.args, call.kwargs, call.out) for call in traced.calls if call.name]
        if leaves([ops, calls, traced.out], Number) or traced.remembers:
            return False
        funcs, those = ([op.func for op in of.ops] for of in (traced, as_given))
        return funcs == those and not unlike(as_given, traced)


def _same(x: Any, y: Any) -> bool:
    return type(x) is type(y) and bool(x == y)


class Number:
    """Stands for a number while a model is traced.

    What Python computes with it is another one; what is asked of one is noted.
    """

    __slots__ = ("_make", "_questions", "_value")

    def __init__(self, value: Any, make: Make, questions: Questions) -> None:
        self._value, self._make, self._questions = value, make, questions

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the number, for ``isinstance``."""
        return type(self._value)

    def _ask(self, func: Callable[[Any], Any]) -> Any:
        """What a function that gives no number says of it."""
        make, answer = self._make, func(self._value)
        self._questions.note(lambda numbers: func(make(numbers)), answer)
        return answer

    def _told(self) -> Any:
        """The number itself."""
        return self._ask(_itself)

    def _of(self, func: Callable[..., Any], *others: Any) -> Any:
        """What a function makes of it, and of others."""
        if any(type(x) not in (*KINDS, bool, Number) for x in others):
            return func(self._told(), *(x._told() if type(x) is Number else x for x in others))
        value = func(self._value, *(x._value if type(x) is Number else x for x in others))
        makes = [x._make if type(x) is Number else _always(x) for x in (self, *others)]
        return Number(value, lambda numbers: func(*(make(numbers) for make in makes)), self._questions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._told(), name)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _itself(x: Any) -> Any:
    return x


def _always(x: Any) -> Make:
    return lambda numbers: x


def _computing(func: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: self._of(func, *others)


def _swapped(func: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda self, other: self._of(lambda x, y: func(y, x), other)


def _asking(func: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: self._ask(func)


def _told_to(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self._told(), name)(*others)


def _define(names: Iterable[str], method: Callable[[str], Callable[..., Any]]) -> None:
    for name in names:
        setattr(Number, f"__{name}__", method(name))


_define("add sub mul truediv floordiv mod pow".split(), lambda n: _computing(getattr(operator, n)))
_define("lshift rshift".split(), lambda n: _computing(getattr(operator, n)))
_define("and or xor".split(), lambda n: _computing(getattr(operator, f"__{n}__")))
_define("eq ne lt le gt ge neg pos abs".split(), lambda n: _computing(getattr(operator, n)))
_define("invert".split(), lambda n: _computing(operator.invert))
_define(
    "radd rsub rmul rtruediv rfloordiv rmod rpow rlshift rrshift".split(),
    lambda n: _swapped(getattr(operator, n[1:])),
)
_define("rand ror rxor".split(), lambda n: _swapped(getattr(operator, f"__{n[1:]}__")))
_ASKED: dict[str, Callable[[Any], Any]] = {
    "bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index, "hash": hash,
    "str": str, "repr": repr,
}  # fmt: skip
_define(_ASKED, lambda n: _asking(_ASKED[n]))
_define("format round trunc floor ceil divmod rdivmod".split(), lambda n: _told_to(f"__{n}__"))

"""Cases of recurrent layers."""

from __future__ import annotations

from tests.ranks.brute import A, X, case


def _weights(gates: int, inner: int, hidden: int, ways: int = 1, layers: int = 1) -> list[X]:
    found = []
    for layer in range(layers):
        n = inner if layer == 0 else ways * hidden
        for _ in range(ways):
            found += [X((gates * hidden, n)), X((gates * hidden, hidden)), *[X((gates * hidden,))] * 2]
    return found


def _flat(gates: int, n: int, h: int) -> tuple[X, ...]:
    return X((gates * h, n)), X((gates * h, h)), X((gates * h,)), X((gates * h,))


_ONE, _MORE = (True, 1, 0.0, True, False, False), (True, 2, 0.0, True, True, True)

CASES = [
    case(
        "lstm",
        A(X((3, 4, 2)), [X((1, 4, 2)), X((1, 4, 2))], _weights(4, 2, 2), *_ONE),
        A(X((5, 2, 3)), [X((4, 5, 1)), X((4, 5, 1))], _weights(4, 3, 1, 2, 2), *_MORE),
        most=6,
    ),
    case(
        "lstm",
        A(
            X((3, 4, 2)),
            [X((2, 4, 2)), X((2, 4, 2))],
            _weights(4, 2, 2, 1, 2),
            True,
            2,
            0.5,
            True,
            False,
            False,
        ),
        random=True,
        most=4,
    ),
    *[
        case(
            name,
            A(X((3, 4, 2)), X((1, 4, 2)), _weights(gates, 2, 2), *_ONE),
            *([A(X((5, 2, 3)), X((4, 5, 1)), _weights(gates, 3, 1, 2, 2), *_MORE)] if gates > 1 else []),
            most=6,
        )
        for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
    ],
    case(
        "gru",
        A(X((4, 3, 2)), X((2, 4, 2)), _weights(3, 2, 2, 1, 2), True, 2, 0.5, True, False, True),
        random=True,
        most=4,
    ),
    case("lstm_cell", A(X((5, 2)), [X((5, 3)), X((5, 3))], *_flat(4, 2, 3)), most=9),
    *[
        case(name, A(X((5, 2)), X((5, 3)), *_flat(gates, 2, 3)), most=9)
        for name, gates in (("gru_cell", 3), ("rnn_tanh_cell", 1), ("rnn_relu_cell", 1))
    ],
]

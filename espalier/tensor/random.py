"""Random values that do not depend on the layout.

Each random operation draws one 64-bit key from torch's default CPU generator, the same on all ranks
(see ``espalier.tensor.random``); each element's value is a hash of that key and the element's *global*
index. So values are the same under any layout and any number of ranks, on CPU and GPU alike, and
``torch.manual_seed``, ``fork_rng``, ``get_rng_state`` and checkpointing's own care of the RNG work.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over a Weyl sequence,
with half of the key added between its rounds, so that the streams of two keys are not shifted
copies of each other. What dropout keeps (:func:`kept`) is told by one of 32 bits, made alike: devices
multiply these in one instruction, and it is drawn for each weight of attention.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch.overrides import handle_torch_function

from espalier.comm.control import compared_with_first
from espalier.comm.custom_ops import recorders
from espalier.comm.dry import know
from espalier.device import get_rng_state, is_accelerator, seed_generator, set_rng_state
from espalier.layout import Layout, local_box
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.mesh.process import World


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _times(key: Key, factor: int) -> Key:
    """The product modulo 2^64, as int64 counts."""
    return key * _signed(factor) if isinstance(key, torch.Tensor) else _signed(key * factor)


WEYL = _signed(0x9E3779B97F4A7C15)
_STEP = _signed(0x2545F4914F6CDD1D * pow(0x9E3779B97F4A7C15, -1, 1 << 64))
MIX1 = _signed(0xBF58476D1CE4E5B9)
MIX2 = _signed(0x94D049BB133111EB)
# of 32 bits, with Wellons' method of looking for such (https://github.com/skeeto/hash-prospector)
HALF_WEYL, HALF_MIX1, HALF_MIX2, HIGH = 0x9E3779B1, 0x21F0AAAD, 0xD35A2D97, 0x85EBCA6B
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


Key = int | torch.Tensor  # a 0-d int64 tensor in recorded programs, which are given keys when they run


def draw_key(mesh: Mesh, generator: torch.Generator | None = None) -> Key:
    """The key of one random operation, from torch's CPU generator, the same on all ranks of the mesh."""
    if recorders():
        return handle_torch_function(draw_key, (), mesh, generator)
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            "DTensors draw their keys from a CPU generator, so that they are the same on every device; "
            f"got one on {generator.device}. Pass torch.Generator('cpu') or none."
        )
    return shared_draw(mesh, generator)


def element_index(layout: Layout, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The flat global index (row-major) of each element of this rank's box."""
    box = local_box(layout)
    if all(n == full for n, full in zip(box.sizes[1:], layout.shape[1:], strict=True)):
        start = box.offsets[0] * layout.stride[0] if box.offsets else 0
        return torch.arange(start, start + math.prod(box.sizes), dtype=dtype, device=device).view(box.sizes)
    total = torch.zeros((), dtype=dtype, device=device)
    for d, (start, n, step) in enumerate(zip(box.offsets, box.sizes, layout.stride, strict=True)):
        along = (
            torch.arange(start * step, (start + n) * step, step, dtype=dtype, device=device)
            if n
            else torch.empty(0, dtype=dtype, device=device)
        )
        total = total + along.view([-1 if i == d else 1 for i in range(len(box.sizes))])
    return total.contiguous()


def addends(key: Key) -> tuple[Key, Key]:
    """What of a key is added to an index, and between the rounds of the hash."""
    return _times(key, _STEP), _times(key ^ 0x5851F42D4C957F2D, 0xD1342543DE82EF95)


def bits(index: torch.Tensor, key: Key) -> torch.Tensor:
    """64 random bits (as int64) for each index; ``index`` is overwritten."""
    first, second = addends(key)
    # index * WEYL + key * 0x2545F4914F6CDD1D; inductor cannot multiply a bare index by so large a number
    x = index.add_(first).mul_(WEYL)
    x = _xor_shift(x, 30).mul_(MIX1).add_(second)
    x = _xor_shift(x, 27).mul_(MIX2)
    return _xor_shift(x, 31)


def halves(key: Key) -> tuple[Key, Key]:
    """As :func:`addends`, of the hash of 32 bits, as int32 counts."""
    first, second = addends(key)
    # the upper halves, of which the second's every bit is made of all of the key's
    return first >> 32, _times(second ^ (second >> 29), MIX2) >> 32


def threshold(p: float) -> int:
    """From which hash of 32 bits on, as int32 counts, dropout with probability p keeps an element."""
    return min((math.ceil(in_single(p) * (1 << 24)) << 8) - (1 << 31), (1 << 31) - 1)


def _narrow(value: Key) -> Key:
    """A number modulo 2^32, as int32 counts."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.int32)
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _kept(low: torch.Tensor, high: torch.Tensor | None, key: Key, p: float) -> torch.Tensor:
    """Which elements are kept, by the halves of their global indices (int32); ``low`` is overwritten."""
    first, second = halves(key)
    x = low.add_(_narrow(first))
    if high is not None:
        between = high * _narrow(HIGH)
        x.add_(between)
        second = between.add_(_narrow(second))
    x = x.mul_(_narrow(HALF_WEYL))
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(HALF_MIX1).add_(_narrow(second))
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_narrow(HALF_MIX2))
    return x >= threshold(p)


def kept_at(index: torch.Tensor, key: Key, p: float) -> torch.Tensor:
    """Which elements of these flat global indices (int64) a dropout keeps that drops with probability p."""
    return _kept(index.to(torch.int32), (index >> 32).to(torch.int32), key, p)


def kept(layout: Layout, key: Key, p: float, device: torch.device) -> torch.Tensor:
    """Which elements of this rank's part a dropout keeps that drops with probability p."""
    if math.prod(layout.shape) >= 1 << 31:
        return kept_at(_unfollowed(element_index(layout, device)), key, p)
    return _kept(_unfollowed(element_index(layout, device, torch.int32)), None, key, p)


def in_single(x: float) -> float:
    """A number as float32 has it."""
    value: float = struct.unpack("f", struct.pack("f", x))[0]
    return value


def uniform(layout: Layout, key: Key, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's part of uniform values in [0, 1), multiples of the dtype's resolution."""
    if not dtype.is_floating_point:
        return _complex(uniform, layout, key, dtype, device)
    digits = _DIGITS.get(dtype, 24)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    top = _right(bits(_unfollowed(element_index(layout, device)), key), 64 - digits)
    return top.to(wide).mul_(2.0**-digits).to(dtype)


def normal(layout: Layout, key: Key, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's part of standard normal values (Box and Muller, 1958)."""
    if not dtype.is_floating_point:
        return _complex(normal, layout, key, dtype, device).mul_(0.5**0.5)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    index = _unfollowed(element_index(layout, device))
    radius = uniform_open(bits(index.clone(), key), wide).log_().mul_(-2).sqrt_()
    angle = uniform_open(bits(index, key ^ 0x3C6EF372FE94F82B), wide).mul_(2 * math.pi)
    return radius.mul_(angle.cos_()).to(dtype)


def _complex(
    part: Callable[[Layout, Key, torch.dtype, torch.device], torch.Tensor],
    layout: Layout,
    key: Key,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Complex values of two real parts that are drawn apart.

    Raises:
        TypeError: whole numbers are asked for.
    """
    if not dtype.is_complex:
        raise TypeError(f"Random values of {dtype}: expected a floating-point or complex dtype, or randint.")
    real = dtype.to_real()
    keys = key, key ^ 0x1B873593CC9E2D51
    return torch.complex(*(part(layout, each, real, device) for each in keys))


def _unfollowed(index: torch.Tensor) -> torch.Tensor:
    """The same; a dry run, which knows whole numbers but no floats, need not compute what these lead to."""
    return know(index, None) if index.is_meta else index


def integers(layout: Layout, key: Key, low: int, high: int, device: torch.device) -> torch.Tensor:
    """This rank's part of whole numbers in [low, high), as int64."""
    raw = bits(element_index(layout, device), key)
    kept = 62 if high - low <= 1 << 62 else 63
    return raw.bitwise_and_((1 << kept) - 1).remainder_(high - low).add_(low)


def uniform_open(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform values in (0, 1] from random bits."""
    digits = _DIGITS[dtype]
    return _right(raw, 64 - digits).add_(1).to(dtype).mul_(2.0**-digits)


def _right(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)


def _xor_shift(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.bitwise_xor_(_right(x, n))


# ---- one stream of random keys for all ranks of a mesh, whatever their generators' seeds
#
# Where the ranks' generators are in one state, as on ranks that are seeded alike, each rank's own draws are
# the keys, so that a program's values are those of one process. Where they are not, the keys are those that
# the mesh's first rank would draw, from a copy of its generator that every rank keeps.
#
# The ranks find out which it is when they first draw after a generator was seeded: they compare its states,
# beside the traffic. From then on nothing is sent. What is known of a seeding stands under a number, its
# *tag*, in the generator's own state, in the place where torch notes the seed, which no draw depends on. So
# ``manual_seed``, also with the same seed again, is noticed, as is a state that is set; and a state that
# was saved and is set again (``fork_rng``, recomputation) brings back the seeding that it belongs to.


_SEED = 8  # bytes at the beginning of a generator's state, in which torch notes its seed
_KEYS = 1 << 16  # keys that can be drawn again
_STARTS = 1 << 8
_TAGS = 1 << 10

REJECTING = frozenset("binomial _standard_gamma _sample_dirichlet".split())
"""Calls of torch that draw as often as values say: numbers are rejected until one fits."""
_by_key: ContextVar[bool] = ContextVar("espalier.by_key", default=False)


class Stream:
    """The keys that the ranks of a mesh draw, of one seeding.

    Attributes:
        ranks: of the world.
        salt: sets it apart from others of the same seeding.
        first: a copy of the first rank's generator; None where all ranks' own ones are in step.
        starts: of :func:`drawing_alike`, the states of ``first``, by what this rank itself has drawn.
    """

    __slots__ = ("_keys", "first", "ranks", "salt", "starts")

    def __init__(self, ranks: frozenset[int], salt: int, first: torch.Generator | None) -> None:
        self.ranks, self.salt, self.first = ranks, salt, first
        self.starts: dict[int, torch.Tensor] = {}
        self._keys: dict[int, int] = {}

    def key(self, own: int) -> int:
        """The key that stands for what this rank itself has drawn."""
        if self.first is None:
            return own ^ self.salt
        # what is drawn again, from a state that was set again, is the same again
        known = self._keys.get(own)
        if known is None:
            if len(self._keys) >= _KEYS:
                del self._keys[next(iter(self._keys))]
            known = self._keys[own] = own_draw(self.first) ^ self.salt
        return known


class Seeding:
    """What is known of seedings of this process's generators.

    Attributes:
        seeds: the true seed, by tag (the last ones).
        count: of tags made.
    """

    seeds: ClassVar[dict[int, int]] = {}
    count: ClassVar[int] = 0

    @staticmethod
    def streams() -> dict[int, list[Stream]]:
        """What the ranks of the running world agreed on, by tag (a cache)."""
        streams: dict[int, list[Stream]] = World.own().setdefault("random streams", {})
        return streams

    @classmethod
    def known(cls, tag: int) -> list[Stream]:
        """The streams of a tag in the running world."""
        return cls.streams().setdefault(tag, [])

    @classmethod
    def tag(cls, generator: torch.Generator) -> int:
        """Give a generator's seeding a number of its own."""
        state = generator.get_state()
        seed = generator.initial_seed()
        digest = hashlib.blake2b(_content(state) + cls.count.to_bytes(8, "little"), digest_size=8)
        tag = int.from_bytes(digest.digest(), "little") >> 1
        cls.count += 1
        cls.seeds[tag] = cls.seeds.get(seed, seed)
        if len(cls.seeds) > _TAGS:
            oldest = next(iter(cls.seeds))
            del cls.seeds[oldest]
            cls.streams().pop(oldest, None)
        generator.set_state(_with_seed(state, tag))
        return tag


def own_draw(generator: torch.Generator | None = None) -> int:
    """64 random bits of a generator, by default torch's CPU generator, on this rank alone."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def shared_draw(mesh: Mesh, generator: torch.Generator | None) -> int:
    """64 random bits, the same on all ranks of a mesh; each rank draws them.

    Raises:
        RuntimeError: the ranks must agree first, and not all came.
    """
    source = torch.default_generator if generator is None else generator
    stream: Stream | None = mesh.streams.get(source.initial_seed())
    if stream is None:
        if mesh.is_dry or mesh.size() == 1:
            return own_draw(generator)
        stream = _agreed(mesh, source)
    return stream.key(own_draw(generator))


def stream_of(mesh: Mesh) -> Stream:
    """The stream of a mesh of several ranks; agreed on, if that was not done since the last seeding."""
    stream: Stream | None = mesh.streams.get(torch.default_generator.initial_seed())
    return _agreed(mesh, torch.default_generator) if stream is None else stream


def _agreed(mesh: Mesh, generator: torch.Generator) -> Stream:
    tag, ranks = generator.initial_seed(), frozenset(mesh.ranks)
    if tag not in Seeding.seeds:
        tag = Seeding.tag(generator)
    streams = Seeding.known(tag)
    for stream in streams:
        if stream.ranks == ranks or (stream.first is None and stream.ranks > ranks):
            _put(mesh, tag, stream)
            return stream
    salt = int.from_bytes(hashlib.blake2b(repr(mesh.ranks).encode(), digest_size=7).digest(), "little")
    mine = (salt if streams else 0).to_bytes(_SEED, "little")
    numbers, alike = compared_with_first(mesh, mine, _content(generator.get_state()), "random")
    first = None
    if not alike:
        first = torch.Generator()
        state = torch.frombuffer(bytearray(bytes(_SEED) + numbers[_SEED:]), dtype=torch.uint8)
        first.set_state(state)
    stream = Stream(ranks, int.from_bytes(numbers[:_SEED], "little"), first)
    streams.append(stream)
    _put(mesh, tag, stream)
    return stream


@contextmanager
def drawing_alike(mesh: Mesh) -> Iterator[None]:
    """While open, what draws from torch's CPU generator by itself draws the same on all ranks."""
    stream = None if mesh.is_dry or mesh.size() == 1 else stream_of(mesh)
    if stream is None or stream.first is None:
        yield
        return
    drawn = own_draw()
    own, again = torch.get_rng_state(), stream.starts.get(drawn)
    start = stream.first.get_state() if again is None else again
    if len(stream.starts) >= _STARTS:
        del stream.starts[next(iter(stream.starts))]
    stream.starts[drawn] = start
    torch.set_rng_state(start)
    _be_in_step(stream.ranks, stream.salt)
    try:
        yield
    finally:
        if again is None:
            stream.first.set_state(torch.get_rng_state())
        torch.set_rng_state(own)


def _be_in_step(ranks: frozenset[int], salt: int = 0) -> None:
    """Let it be known that ranks draw for DTensors from the state in which torch's generator is now."""
    Seeding.known(Seeding.tag(torch.default_generator)).append(Stream(ranks, salt, None))


def filled_by_key(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An initialisation that draws as often as values say, or plain numbers, or nothing on ``meta``.

    Of a DTensor it takes one key of the program's, on ranks that have no part of it, too.
    """
    signature = inspect.signature(fill)

    @functools.wraps(fill)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        layout = vars(given["tensor"]).get("_layout")  # what only answers as a DTensor has none
        if layout is None or is_drawing_by_key() or recorders():
            return fill(*args, **kwargs)
        with drawing_by_key(layout.mesh, given.pop("generator", None)):
            _be_in_step(frozenset(layout.mesh.ranks))
            return fill(**given)

    return filled


@contextmanager
def drawing_by_key(mesh: Mesh, generator: torch.Generator | None = None) -> Iterator[None]:
    """While open, what draws by itself draws the same on all ranks: from generators seeded by one key.

    However much it draws, it takes that one key of the program's: how often a value is rejected nobody else
    knows.
    """
    key = draw_key(mesh, generator)
    device = mesh.device() if not mesh.is_dry and is_accelerator(mesh.device_type) else None
    own, of_device = torch.get_rng_state(), None if device is None else get_rng_state(device)
    torch.default_generator.manual_seed(int(key))
    if device is not None:
        seed_generator(device, int(key))
    try:
        with setting(_by_key, True):
            yield
    finally:
        torch.set_rng_state(own)
        if device is not None and of_device is not None:
            set_rng_state(device, of_device)


def is_drawing_by_key() -> bool:
    """Whether a :func:`drawing_by_key` is open."""
    return _by_key.get()


def _put(mesh: Mesh, tag: int, stream: Stream) -> None:
    if len(mesh.streams) >= _TAGS:
        del mesh.streams[next(iter(mesh.streams))]
    mesh.streams[tag] = stream


def state_of_keys(mesh: Mesh) -> torch.Tensor:
    """The state of torch's CPU generator from which a program goes on drawing the keys of a mesh."""
    first = _first(mesh)
    return without_tag(torch.get_rng_state() if first is None else first.get_state())


def _first(mesh: Mesh) -> torch.Generator | None:
    """The copy of the first rank's CPU generator, if its ranks' own ones are known to be out of step."""
    stream: Stream | None = mesh.streams.get(torch.default_generator.initial_seed())
    return None if stream is None else stream.first


def position_of_keys(mesh: Mesh, own: torch.Tensor) -> torch.Tensor:
    """What of the generators must be equal on all ranks of a mesh; ``own``: this rank's state."""
    first = _first(mesh)
    return (own if first is None else first.get_state())[_SEED:]


def without_tag(state: torch.Tensor) -> torch.Tensor:
    """A generator's state with its true seed."""
    tag = int.from_bytes(state.numpy()[:_SEED].tobytes(), "little")
    return _with_seed(state, Seeding.seeds[tag]) if tag in Seeding.seeds else state


def same_position(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two states of generators draw the same, whatever their seeds are called."""
    return torch.equal(a, b) or torch.equal(a[_SEED:], b[_SEED:])


def same_seed(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two states of generators are of one seeding."""
    return torch.equal(a[:_SEED], b[:_SEED])


def at_position(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A generator's state, of the seeding of one and with what another has drawn."""
    return torch.cat([own[:_SEED], other[_SEED:]])


def true_seeds(initial_seed: Callable[[], int]) -> Callable[[], int]:
    """torch's ``initial_seed``, which tells the seed that a tag stands for."""

    def true_seed() -> int:
        seed = initial_seed()
        return Seeding.seeds.get(seed, seed)

    true_seed.__doc__, true_seed.__name__ = initial_seed.__doc__, "initial_seed"
    return true_seed


def _content(state: torch.Tensor) -> bytes:
    return bytes(state.numpy()[_SEED:].tobytes())


def _with_seed(state: torch.Tensor, seed: int) -> torch.Tensor:
    head = torch.frombuffer(bytearray((seed % (1 << 64)).to_bytes(_SEED, "little")), dtype=torch.uint8)
    return torch.cat([head, state[_SEED:]])

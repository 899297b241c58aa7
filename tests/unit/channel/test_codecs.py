"""Codecs: bytes by hand, exact lengths, unbiased rounding, damage refused."""

import math
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.channel.compression.codecs import CODECS, codec, pack, unpack
from coterie.errors import ConfigError, CoterieError

SPECS = [
    "raw",
    "fp16",
    "bf16",
    "qsgd:levels=7,bucket=512",
    "qsgd:levels=127,bucket=512",
    "qsgd:levels=1000,bucket=all",
    "qsgd:levels=2,bucket=3",
    "topk:share=0.01",
    "topk:share=0.5",
    "topk:share=1.0",
    "raw+zstd",
    "qsgd:levels=7,bucket=512+zstd:level=9",
]
few = settings(max_examples=60, deadline=None, derandomize=True)
modest = st.floats(-1e4, 1e4, width=32)
any_finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def there_and_back(text, array, seed=0):
    made = codec(text)
    payload = made.encode(array, seed)
    return payload, made.decode(payload, "f4", array.shape)


def numbers(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=count).astype(np.float32))


# Bytes by hand

LEFT_OUT = {0.25, 0.5}  # by topk: no other number below is of these sizes


@pytest.mark.parametrize(
    ("text", "array", "expected"),
    [
        ("raw", [1.0, -2.0], "0000803f 000000c0"),
        ("fp16", [1.0, -2.0], "003c 00c0"),
        ("bf16", [1.0, -2.0], "803f 00c0"),
        # Norm 7, so ξ = 2, -3, 6; codes ξ + 7 are 9, 4, 13: 4 bits each, the first the lowest.
        ("qsgd:levels=7,bucket=512", [2.0, -3.0, 6.0], "0000e040 49 0d"),
        # Norms 3, 0, 5; codes 6 3, 3 3, 0 of 3 bits: 6 + 3·8 + 3·64 + 3·512 = 0x06de.
        ("qsgd:levels=3,bucket=2", [3.0, 0, 0, 0, -5], "00004040 00000000 0000a040 de06"),
        # Norm 5; codes 1600 = 0x640, 1800 = 0x708 of 11 bits: low bytes, then 6 + 7·8 = 0x3e.
        ("qsgd:levels=1000,bucket=all", [3.0, 4.0], "0000a040 40 08 3e"),
        # Norm 127; codes 0 and 127 of 8 bits.
        ("qsgd:levels=127,bucket=512", [-127.0, 0.0], "0000fe42 00 7f"),
        # Two of eight: places 1 and 6 of 3 bits, 1 + 6·8 = 0x31; a bitmap would be 8 bits.
        ("topk:share=0.25", [0, -4.0, 0.5, 0, 0, 0, 2.0, 0.25], "000080c0 00000040 31"),
        # Three of four: places would take 6 bits, so a bit for each: 1101, the first the lowest.
        ("topk:share=0.75", [1.0, 0.5, 1.0, 1.0], "0000803f 0000803f 0000803f 0d"),
        ("topk:share=1", [1.0, 0.0], "0000803f 00000000"),
    ],
)
def test_bytes_by_hand(text, array, expected):
    payload, back = there_and_back(text, torch.tensor(array))
    assert bytes(payload).hex() == expected.replace(" ", "")
    assert back.tolist() == [0 if abs(x) in LEFT_OUT else x for x in array]


def test_halves_round_to_the_nearest_and_to_even():
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    assert there_and_back("bf16", ties)[1].tolist() == [1, 1 + 2**-6, 1 + 2**-7]
    assert there_and_back("fp16", torch.tensor([2049.0, 2051.0]))[1].tolist() == [2048, 2052]
    assert there_and_back("fp16", torch.tensor([65519.0]))[1].tolist() == [65504]


def test_halves_refuse_what_would_become_infinite_only():
    with pytest.raises(CoterieError, match=r"-65520 is too large for fp16.*use bf16"):
        codec("fp16").encode(torch.tensor([1.0, -65520.0]))
    with pytest.raises(CoterieError, match=r"too large for bf16.*use raw"):
        codec("bf16").encode(torch.tensor([3.4e38]))
    for text in ("fp16", "bf16"):
        back = there_and_back(text, torch.tensor([math.inf, math.nan]))[1]
        assert back[0] == math.inf
        assert back[1].isnan()


# Lengths


@few
@given(
    st.integers(0, 3000),
    st.one_of(st.integers(1, 40), st.integers(1, 32767)),
    st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 4000)),
)
def test_qsgd_is_exactly_as_long_as_its_formula(count, levels, bucket):
    made = codec(f"qsgd:levels={levels},bucket={bucket}")
    bits = 32 * math.ceil(count / (bucket or max(count, 1)))
    bits += count * (1 + math.ceil(math.log2(levels + 1)))
    payload = made.encode(numbers(count))
    assert len(payload) == math.ceil(bits / 8) == made.length("f4", [count])
    assert made.decode(payload, "f4", [count]).shape == (count,)


@few
@given(st.integers(0, 3000), st.integers(1, 1000))
def test_topk_is_exactly_as_long_as_its_formula(count, thousandths):
    made = codec(f"topk:share={thousandths / 1000}")
    kept = -(-thousandths * count // 1000)
    bits = 32 * kept
    if kept < count:
        bits += min(count, kept * math.ceil(math.log2(count)))
    payload = made.encode(numbers(count))
    assert len(payload) == math.ceil(bits / 8)
    assert np.count_nonzero(made.decode(payload, "f4", [count])) == kept


@few
@given(st.integers(1, 33), st.integers(0, 100), st.integers(0, 2**32))
def test_packing_is_undone_and_is_one_long_number(width, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**width, count)
    packed = pack(codes, width)
    assert len(packed) == math.ceil(count * width / 8)
    assert (unpack(packed, count, width) == codes).all()
    if width <= 8:
        number = sum(int(code) << (place * width) for place, code in enumerate(codes))
        assert packed.tobytes() == number.to_bytes(len(packed), "little")


def test_packing_is_undone_beyond_one_chunk():
    for width in (3, 4, 11):
        codes = np.random.default_rng(0).integers(0, 2**width, 70_001).astype(np.uint16)
        assert (unpack(pack(codes, width), len(codes), width) == codes).all()


# QSGD's random rounding

REPEATS = 100_000
SIGMAS = 6  # a right codec fails a single comparison once in 10^9 seeds; the seed is fixed


def quantised(row, levels, repeats=REPEATS):
    """Many independent codings of one bucket, a row each, and the exact norm."""
    made = codec(f"qsgd:levels={levels},bucket={len(row)}")
    array = torch.tensor(row).repeat(repeats)
    back = made.decode(made.encode(array, seed=11), "f4", array.shape)
    exact = array[: len(row)].double().numpy()
    return back.view(repeats, -1).double().numpy(), exact, float(np.linalg.norm(exact))


ROWS = {
    "mixed": [0.3, -0.7, 1e-3, -2.5, 0.0, 0.11, 1.9, -0.05],
    "equal": [0.1] * 16,
    "one large": [100.0, 0.1, -0.2, 0.3],
    "tiny": [3e-40, -1e-40, 2e-41, 7e-41],
    "huge": [1.7e38, -1e38, 3e37, 2e36],
}


@pytest.mark.parametrize("levels", [1, 7, 127])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_qsgd_is_unbiased_and_within_its_variance(row, levels):
    found, exact, norm = quantised(row, levels)
    step = norm / levels
    low = np.floor(exact / step)
    chance = exact / step - low  # of the upper neighbour
    # float32 rounds what arrives, and the norm; subnormal numbers are 1.4e-45 apart.
    slack = norm * 2**-22 + 3e-45
    upper = found > (low + 0.5) * step
    assert (np.abs(found - (low + upper) * step) <= slack).all()  # a neighbour, never another
    spread = np.sqrt(chance * (1 - chance) / REPEATS)
    assert (np.abs(upper.mean(0) - chance) <= SIGMAS * spread + 1e-5 * (spread == 0)).all()
    assert (np.abs(found.mean(0) - exact) <= SIGMAS * step * spread + slack).all()
    # Each coordinate's variance is at most step²/4; the lemma bounds their sum. A quantity between
    # 0 and b has a standard error of at most b/(2√n).
    error = ((found - exact) / norm) ** 2
    count, part = len(row), 1 / levels
    assert (error.mean(0) <= part**2 / 4 + SIGMAS * part**2 / (2 * REPEATS**0.5)).all()
    lemma = min(count * part**2, count**0.5 * part)
    assert error.sum(1).mean() <= lemma + SIGMAS * count * part**2 / (2 * REPEATS**0.5)


def test_qsgd_rounds_every_number_by_a_die_of_its_own():
    found, exact, _ = quantised([0.3, -0.7, 0.9, -0.5], 7)
    errors = (found - exact) / (found - exact).std(0)
    limit = SIGMAS / REPEATS**0.5
    between = errors.T @ errors / REPEATS - np.eye(4)
    assert np.abs(between).max() < limit
    for later in (1, 2, 8192, 16384):  # 8192 buckets of four are worked on at a time
        assert np.abs((errors[later:] * errors[:-later]).mean(0)).max() < 1.2 * limit


@few
@given(st.lists(any_finite, min_size=1, max_size=40), st.integers(1, 300), st.integers(1, 50))
def test_qsgd_moves_no_number_further_than_a_step(row, levels, bucket):
    array = torch.tensor(row)
    made = codec(f"qsgd:levels={levels},bucket={bucket}")
    parts = [p.double() for p in array.split(bucket)]
    with np.errstate(over="ignore"):
        norms = np.float32([p.norm().item() for p in parts])  # as they would travel
    if not np.isfinite(norms).all():
        with pytest.raises(CoterieError, match="norm"):
            made.encode(array)
        return
    back = made.decode(made.encode(array, 3), "f4", array.shape).double()
    for part, got in zip(parts, back.split(bucket), strict=True):
        limit = part.norm() / levels
        assert ((got - part).abs() <= limit * (1 + 1e-6) + 3e-45).all()
        assert ((got == 0) | (got.sign() == part.sign())).all()
        assert (got[part == 0] == 0).all()


@pytest.mark.parametrize(
    ("levels", "row"),
    [
        (7, [2.0, -3.0, 6.0]),
        (49, [14.0, -21.0, 42.0]),
        (5, [0.75, -1.0]),
        (32767, [32767.0]),
        (3, [1 / 3, 0.0]),  # all of the norm in one number, which no binary fraction is
    ],
)
def test_what_lies_on_levels_stays_there(levels, row):
    array = torch.tensor(row).repeat(20_000)
    made = codec(f"qsgd:levels={levels},bucket={len(row)}")
    back = made.decode(made.encode(array, seed=5), "f4", array.shape)
    assert torch.equal(back, array)


def test_levels_are_those_of_the_norm_that_travels():
    # a² + b² = s² + 1: the norm is s(1 + 1/(2s²)), which float32 rounds to s. So a and b lie on
    # levels of the rounded norm; against the exact one each would move once in 10^5 times.
    levels = 30_000
    first = next(
        a for a in range(levels - 1, 0, -1) if math.isqrt(r := levels**2 + 1 - a * a) ** 2 == r
    )
    second = math.isqrt(levels**2 + 1 - first**2)
    assert np.float32(math.sqrt(first**2 + second**2)) == levels
    array = torch.tensor([float(first), -float(second)]).repeat(500_000)
    made = codec(f"qsgd:levels={levels},bucket=2")
    assert torch.equal(made.decode(made.encode(array, seed=2), "f4", array.shape), array)


@pytest.mark.parametrize("bucket", [1, 5, 512, 32768, 40001, 0])
def test_every_number_is_measured_by_its_own_bucket(bucket):
    # One number in each bucket is its norm, whatever lies in the others.
    count = 100_003
    size = bucket or count
    starts = np.arange(0, count, size)
    draw = np.random.default_rng(0)
    places = starts + draw.integers(0, np.minimum(size, count - starts))
    array = torch.zeros(count)
    array[torch.from_numpy(places)] = numbers(len(starts), seed=1)
    assert torch.equal(there_and_back(f"qsgd:levels=6,bucket={bucket}", array)[1], array)


def test_a_seed_says_all():
    made, array = codec("qsgd"), numbers(70_000)
    first = made.encode(array, seed=1)
    torch.manual_seed(5)
    np.random.seed(5)
    assert made.encode(array, seed=1) == first
    assert made.encode(array, seed=2) != first
    assert made.encode(array) == made.encode(array, seed=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("text", ["qsgd", "topk"])
def test_no_number_is_refused(text, bad):
    with pytest.raises(CoterieError, match="NaN and infinite numbers cannot be sent as"):
        codec(text).encode(torch.tensor([1.0, bad]))


# Top-k


@few
@given(st.lists(st.one_of(modest, st.sampled_from([1.0, -1.0])), max_size=60), st.floats(0.01, 1))
def test_topk_keeps_the_largest_and_of_equals_the_first(row, share):
    kept = math.ceil(share * len(row)) if share * len(row) % 1 else round(share * len(row))
    order = sorted(range(len(row)), key=lambda j: (-abs(row[j]), j))[:kept]
    expected = [x if j in order else 0.0 for j, x in enumerate(row)]
    assert there_and_back(f"topk:share={share}", torch.tensor(row))[1].tolist() == expected


def test_a_share_counts_as_it_is_written():
    # In binary 0.07·100 is 7.000000000000001.
    assert np.count_nonzero(there_and_back("topk:share=0.07", torch.ones(100))[1]) == 7
    assert np.count_nonzero(there_and_back("topk:share=1e-9", torch.ones(100))[1]) == 1


# All of them


@pytest.mark.parametrize("text", SPECS)
def test_a_text_makes_the_codec_that_has_it(text):
    assert codec(text).spec == text
    assert text.partition(":")[0].partition("+")[0] in CODECS


def test_what_a_text_leaves_out_is_filled_in():
    assert codec("qsgd").spec == "qsgd:levels=7,bucket=512"
    assert codec("qsgd:bucket=0").spec == "qsgd:levels=7,bucket=all"
    assert codec(" topk + zstd:level=3 ").spec == "topk:share=0.01+zstd"


@pytest.mark.parametrize("text", SPECS)
def test_exact_means_exact(text):
    array = numbers(1000)
    assert torch.equal(there_and_back(text, array)[1], array) == codec(text).exact


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (2, 3, 5), (700,)])
def test_shapes_come_back_and_nothing_is_changed(text, shape):
    array = numbers(math.prod(shape)).view(shape).requires_grad_()
    before = array.detach().clone()
    payload, back = there_and_back(text, array)
    assert back.shape == array.shape
    assert back.dtype == torch.float32
    assert torch.equal(array.detach(), before)
    copy = bytes(payload)
    back.fill_(9.0)  # the array is the receiver's own
    assert bytes(payload) == copy


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("array", [numbers(600).view(20, 30).t()[::2], numbers(80)[::2]])
def test_strided_arrays_and_views_of_a_message(text, array):
    payload, back = there_and_back(text, array)
    assert payload == there_and_back(text, array.contiguous())[0]
    message = memoryview(b"odd" + bytes(payload))[3:]  # not aligned, and read-only
    assert torch.equal(codec(text).decode(message, "f4", array.shape), back)


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int64, "i8"), (torch.float64, "f8"), (torch.uint8, "u1"), (torch.bool, "b1")],
)
def test_other_types_are_never_changed(text, dtype, name):
    array = torch.tensor([[0, 1], [200, 3]]).to(dtype)
    made = codec(text)
    payload = made.encode(array, 1)
    assert torch.equal(made.decode(payload, name, [2, 2]), array)
    with pytest.raises(CoterieError):
        made.decode(payload[:-1], name, [2, 2])


# Damage


@pytest.mark.parametrize("text", SPECS)
def test_a_wrong_length_is_refused(text):
    made = codec(text)
    payload = bytes(made.encode(numbers(40)))
    for wrong in (*(payload[:end] for end in range(len(payload))), payload + b"\0"):
        with pytest.raises(CoterieError, match=r"cut short|damaged"):
            made.decode(wrong, "f4", [40])
    for shape in ([400], [39, 20], [0], [-5, -8]):
        with pytest.raises(CoterieError, match="damaged"):
            made.decode(payload, "f4", shape)
    with pytest.raises(CoterieError, match="type of array 'f3'"):
        made.decode(payload, "f3", [40])


@few
@given(st.sampled_from(SPECS), st.data())
def test_any_bytes_are_an_array_or_refused(text, data):
    made = codec(text)
    length = len(made.encode(numbers(12)))
    payload = data.draw(st.binary(min_size=length, max_size=length))
    try:
        back = made.decode(payload, "f4", [12])
    except CoterieError:
        return
    assert back.shape == (12,)
    if text.startswith("qsgd"):
        assert back.isfinite().all()


ONE = struct.pack("<f", 1.0)


@pytest.mark.parametrize(
    ("text", "payload", "count", "why"),
    [
        ("qsgd:levels=7", struct.pack("<f", -1.0) + b"\x77", 2, "a norm"),
        ("qsgd:levels=7", struct.pack("<f", math.nan) + b"\x77", 2, "a norm"),
        ("qsgd:levels=7", struct.pack("<f", math.inf) + b"\x77", 2, "a norm"),
        ("qsgd:levels=7", ONE + b"\x7f", 2, "a level"),  # 15 of 14
        ("qsgd:levels=5", ONE + b"\xb0", 2, "a level"),  # 11 of 10
        ("topk:share=0.25", ONE + ONE + b"\x0e", 8, "indices"),  # 6, then 1
        ("topk:share=0.25", ONE + ONE + b"\x09", 8, "indices"),  # 1 twice
        ("topk:share=0.2", ONE + ONE + b"\xa0", 10, "indices"),  # 0, then 10 of 0 to 9
        ("topk:share=0.75", 3 * ONE + b"\x03", 4, "indices"),  # two bits of three
    ],
)
def test_impossible_contents_are_refused(text, payload, count, why):
    with pytest.raises(CoterieError, match=f"damaged.*{why}"):
        codec(text).decode(payload, "f4", [count])


def test_the_last_possible_contents_are_not():
    assert codec("qsgd:levels=5").decode(ONE + b"\xa0", "f4", [2]).tolist() == [-1, 1]
    last = codec("topk:share=0.2").decode(ONE + ONE + b"\x90", "f4", [10])
    assert last.nonzero().view(-1).tolist() == [0, 9]


def test_a_damaged_frame_never_becomes_another_array():
    made, array = codec("raw+zstd"), torch.arange(100.0)
    payload = bytes(made.encode(array))
    refused = 0
    for place in range(len(payload)):
        for bit in range(8):
            broken = bytearray(payload)
            broken[place] ^= 1 << bit
            try:
                assert torch.equal(made.decode(bytes(broken), "f4", [100]), array)
            except CoterieError:
                refused += 1
    assert refused > 7 * len(payload)


def test_a_frame_must_say_how_much_it_holds_and_hold_no_more():
    made = codec("raw+zstd")
    large = zstandard.ZstdCompressor().compress(bytes(10**8))  # a few kilobytes
    with pytest.raises(CoterieError, match="100000000 bytes"):
        made.decode(large, "f4", [10])
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(40))
    with pytest.raises(CoterieError):
        made.decode(silent, "f4", [10])
    with pytest.raises(CoterieError):
        made.decode(bytes(made.encode(torch.zeros(10))) * 2, "f4", [10])


def test_zstd_shortens_what_can_be_shortened():
    array = torch.zeros(100_000)
    assert len(codec("qsgd+zstd").encode(array)) * 100 < len(codec("qsgd").encode(array))


# What a user may write


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("qsdg", "unknown codec 'qsdg'; did you mean 'qsgd'"),
        ("", "unknown codec ''"),
        ("qsgd:levles=7", "unknown parameter of codec 'qsgd' 'levles'; did you mean 'levels'"),
        ("qsgd:", "unknown parameter of codec 'qsgd' ''"),
        ("qsgd:levels=0", "codec 'qsgd': levels = 0: must be at least 1"),
        ("qsgd:levels=32768", "levels = 32768: must be less than 32768"),
        ("qsgd:levels=7.5", "levels = 7.5: must be a valid integer"),
        ("qsgd:levels", "levels = '': must be a valid integer"),
        ("qsgd:levels=7,levels=9", "given twice"),
        ("qsgd:bucket=-1", "bucket = -1: must be at least 0"),
        ("topk:share=0", "share = 0: must be greater than 0"),
        ("topk:share=1.01", "share = 1.01: must be at most 1"),
        ("topk:share=nan", "share = nan: must be at most 1"),
        ("raw:levels=7", "codec 'raw' takes no parameters, but 'levels' was given"),
        ("zstd", "after another codec, as in 'raw.zstd'"),
        ("raw+zstd+zstd", "once"),
        ("raw+zsdt", "unknown codec after '.' 'zsdt'; did you mean 'zstd'"),
        ("raw+zstd:level=23", "level = 23: must be at most 22"),
    ],
)
def test_a_wrong_text_is_refused_with_a_sentence(text, why):
    with pytest.raises(ConfigError, match=why):
        codec(text)

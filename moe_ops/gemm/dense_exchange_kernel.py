"""Two neighbouring programs that computed halves of K of one tile of 128 rows: each sends the other its sums of 64 rows and finishes the other 64.

Sums travel in threes, 16 bytes that a number completes, so that each unit says by itself whether it is there: its reader needs no fence or flag.
They go to a slot that the receiving program claims when it starts. It counts the slot's number up, tells the other program slot and number, and
gives the slot back once it has read it. All that a slot holds is of the last launch that had it, so the new number is nowhere in it. A device has a
slot for each SM, no SM has registers for two such programs, and so one is free.

Both programs wait, so both have to run at once. Programs start in the order of their numbers (observed, not promised), so that each such kernel has
at most one program whose neighbour has not started; that one finds room as long as fewer such kernels run at once than SMs are free.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.core.formats import ceil_div
from moe_ops.core.zeroed import shared_words
from moe_ops.gemm.gluon_compat import thread_barrier

#: Before all slots there is a word for each: the number of the last launch that had it, or -1 while one has it.
HEAD_WORDS, SLOT_BITS, NUMBERS = gl.constexpr(256), gl.constexpr(8), gl.constexpr(1 << 22)


def slots(device: torch.device, sms: int, width: int) -> torch.Tensor:
    """The slots of a device, for all its streams and graphs. Each width of a tile has its own: a launch fills all of a slot."""
    if sms > HEAD_WORDS.value:
        raise ValueError(f"slots: {sms} SMs, but a slot's place has {SLOT_BITS.value} bits")
    return shared_words(device, HEAD_WORDS.value + sms * ceil_div(width // 2, 3) * 128 * 4)


@gluon.constexpr_function
def _head(address: int) -> str:
    """PTX: a is where a thread's first unit lies, between those of its neighbours, and b where its warp's first one lies."""
    return (
        "{ .reg .u32 t, n; .reg .u64 a, b, lo, hi; .reg .b128 q; .reg .pred p; mov.u32 t, %tid.x; and.b32 t, t, 127; "
        f"mad.wide.u32 a, t, 16, ${address}; and.b32 t, t, 96; mad.wide.u32 b, t, 16, ${address}; "
    )


@gluon.constexpr_function
def _send_ptx(words: int) -> str:
    """Operands: results nobody wants, the thread's words, the slot's address and number, each as often as there are words."""
    ptx = _head(2 * words)
    for i in range(0, words, 3):
        x, y, z = (f"${words + min(i + j, words - 1)}" for j in range(3))
        ptx += f"mov.b64 lo, {{{x}, {y}}}; mov.b64 hi, {{{z}, ${3 * words}}}; mov.b128 q, {{lo, hi}}; "
        ptx += f"st.relaxed.gpu.global.b128 [a + {i // 3 * 2048}], q; "
    return ptx + "".join(f"mov.u32 ${i}, 0; " for i in range(words)) + "}"


@gluon.constexpr_function
def _load(words: int, i: int, base: str, number: str) -> str:
    x, y, z = (f"${i + j}" if i + j < words else "t" for j in range(3))
    unit = f"ld.relaxed.gpu.global.b128 q, [{base} + {i // 3 * 2048}]; mov.b128 {{lo, hi}}, q; "
    return unit + f"mov.b64 {{{x}, {y}}}, lo; mov.b64 {{{z}, {number}}}, hi; "


@gluon.constexpr_function
def _receive_ptx(words: int) -> str:
    """Operands: the thread's words as results, the slot's address and number, each as often.

    A warp looks at one unit until that is there, and only then at all. 128 rows of 4096 x 8192 take 13.3 us, and 14.2 where all threads look at all
    their units all the time (H200, 2026-12-01, results/nvidia_h200/dense_sweep.json, exchange): it seems that loads of lines that are about to be
    written hold the writes up.
    """
    number, units = f"${2 * words}", range(0, words, 3)
    ptx = _head(words) + ".reg .u32 " + ", ".join(f"n{i}" for i in units) + "; "
    ptx += "FIRST: " + _load(words, units[-1], "b", "n") + f"setp.ne.u32 p, n, {number}; @p bra FIRST; "
    ptx += "AGAIN: " + "".join(_load(words, i, "a", f"n{i}") for i in units)
    return ptx + f"setp.ne.u32 p, n0, {number}; " + "".join(f"setp.ne.or.u32 p, n{i}, {number}, p; " for i in units[1:]) + "@p bra AGAIN; }"


@gluon.constexpr_function
def _constraints(words: int, kinds: str) -> str:
    """`words` operands of each kind."""
    return ",".join(kind for kind in kinds.split() for _ in range(words))


@gluon.jit
def _parts(slot, slots_ptr, W: gl.constexpr):
    """A slot's address and number."""
    place = slot & ((1 << SLOT_BITS) - 1)
    return (slots_ptr + HEAD_WORDS + place * ((W // 2 + 2) // 3 * 128 * 4)).to(gl.int64), slot >> SLOT_BITS


@gluon.jit
def claim(slots_ptr, SLOTS: gl.constexpr):
    """A slot that was free, number and place in one word, for a warpgroup.

    The loop is one thread's, within PTX. As a loop of the language ptxas takes every later branch of the warpgroup for divergent, and each step of
    the main loop gets 11 instructions more (Triton 3.6).
    """
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    slot = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 i, n; .reg .u64 a; mov.u32 $0, 0; setp.ne.s32 p, $1, 0; @p bra DONE; "
        "mov.u32 i, %smid; "  # most likely free
        "CLAIM: rem.u32 i, i, $3; mad.wide.u32 a, i, 4, $2; atom.relaxed.gpu.global.exch.b32 n, [a], -1; setp.eq.s32 p, n, -1; "
        "@p add.u32 i, i, 1; @p bra CLAIM; add.u32 n, n, 1; rem.u32 n, n, $5; shl.b32 n, n, $4; or.b32 $0, n, i; DONE: }",
        "=&r,r,l,r,r,r", [thread, slots_ptr.to(gl.int64), SLOTS, SLOT_BITS, NUMBERS], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.sum(slot, 0)


@gluon.jit
def tell(slot, words_ptr):
    """Tell the other program which slot to send to."""
    gl.atomic_xchg(words_ptr + gl.program_id(0), slot + 1, sem="relaxed")


@gluon.jit
def told(words_ptr):
    """Wait, as one warp, for the other program's slot. The word is 0 again afterwards, for the next kernel."""
    word = words_ptr + (gl.program_id(0) ^ 1)
    slot = gl.inline_asm_elementwise(
        "{ .reg .pred p; WAIT: ld.relaxed.gpu.global.u32 $0, [$1]; setp.eq.u32 p, $0, 0; @p bra WAIT; }",
        "=r,l", [word.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    thread_barrier()  # all threads have seen the word
    gl.store(word, 0)
    return slot - 1


@gluon.jit
def send(x, slot, slots_ptr, W: gl.constexpr):
    """Store x (64, W), the sums of a warpgroup, to a slot."""
    WORDS: gl.constexpr = W // 2
    at, number = _parts(slot, slots_ptr, W)
    gl.inline_asm_elementwise(
        _send_ptx(WORDS), _constraints(WORDS, "=&r r l r"), [x.to(gl.int32, bitcast=True), at, number],
        dtype=gl.int32, is_pure=False, pack=WORDS,
    )  # fmt: skip


@gluon.jit
def received(x, slot, slots_ptr, W: gl.constexpr):
    """x plus what the other program sends to a slot from the same places of its tensor. The slot is free again afterwards."""
    WORDS: gl.constexpr = W // 2
    at, number = _parts(slot, slots_ptr, W)
    at += gl.zeros_like(x).to(gl.int64)
    y = gl.inline_asm_elementwise(
        _receive_ptx(WORDS), _constraints(WORDS, "=&r l r"), [at, number], dtype=gl.int32, is_pure=False, pack=WORDS
    )  # fmt: skip
    thread_barrier()  # all threads have read it
    gl.atomic_xchg(slots_ptr + (slot & ((1 << SLOT_BITS) - 1)), number, sem="relaxed")
    return x + y.to(gl.float32, bitcast=True)

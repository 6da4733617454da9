"""Two neighbouring programs that computed halves of K of one tile of 128 rows: each sends the other its sums of 64 rows and finishes the other 64.

Both wait, so both have to run at once. Programs start in the order of their numbers (observed, not promised), so that each such kernel has at most
one program whose neighbour has not started; that one finds room as long as fewer such kernels run at once than SMs are free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.gemm.gluon_compat import thread_barrier


@gluon.jit
def _places(x, W: gl.constexpr):
    r = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    c = gl.arange(0, W, gl.SliceLayout(0, x.type.layout))
    return r[:, None] * W + c[None, :]


@gluon.jit
def send(x, part_ptr, words_ptr, W: gl.constexpr):
    """Store x (64, W) to this program's slot, then 1 to its word."""
    p = gl.program_id(0)
    gl.store(part_ptr + p.to(gl.int64) * (64 * W) + _places(x, W), x)
    thread_barrier()
    gl.atomic_xchg(words_ptr + p, 1, sem="release")


@gluon.jit
def received(x, part_ptr, words_ptr, W: gl.constexpr):
    """x plus what the other program of the pair sends; its word is 0 again afterwards, for the next kernel."""
    p = gl.program_id(0) ^ 1
    word = words_ptr + p
    gl.inline_asm_elementwise(
        "{ .reg .pred p; WAIT: ld.acquire.gpu.global.u32 $0, [$1]; setp.eq.u32 p, $0, 0; @p bra WAIT; }",
        "=r,l", [word.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    y = gl.load(part_ptr + p.to(gl.int64) * (64 * W) + _places(x, W), cache_modifier=".cg")
    thread_barrier()  # all threads have seen the word
    gl.store(word, 0)
    return x + y

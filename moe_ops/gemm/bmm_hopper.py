"""Batched GEMM of absorbed MLA for Hopper in Gluon: FP8 block scaling, the 16-bit activation quantized 1x128 on its way to the tensor cores.

    k_b_proj   K = 128    a block of rows is quantized once and meets all column tiles of its head
    v_b_proj   N = 128    the blocks of K of a block of rows meet one column tile

One program on each SM walks neighbouring items of (head, 64, 128 or 192 rows); up to four blocks of weights stay for all items of a head. Roles:

    producers   a warp for each 64 rows: activations by TMA through a ring of its own, across items, and beside them the scales of those quantized
                before, by cp.async; the first one brings the weights too, in a ring for all
    consumers   two warpgroups, or three (`bmm_config.hopper_consumers`), 64 rows each; with 64 rows in all, two take turns at the steps instead
                (along K their sums are added). They read the activation in the layout in which the instruction takes its first operand from
                registers: quantized there, it is never written anywhere. 16-bit results of more than 64 tokens leave by TMA.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.core.arch import arch_of
from moe_ops.core.formats import as_e4m3, ceil_div
from moe_ops.core.launch import launch
from moe_ops.gemm.bmm_config import W_SLOTS, hopper_rows, hopper_slots, view_of_heads
from moe_ops.gemm.gluon_compat import cp_async, gdc_launch_dependents, gdc_wait, prefetch_l2, thread_barrier, tma_load, tma_store_wait
from moe_ops.gemm.hopper_epilogue import store_tile
from moe_ops.gemm.hopper_quantize import quantize_tile

#: Steps that a producer has asked for and not received yet, at most: more only lets some programs starve. v_b_proj quantized before, us with as many
#: as fit and with 2: 6.7 and 6.6, 8.7 and 8.2, 13.1 and 12.5, 18.1 and 17.9 at 64, 128, 256 and 512 tokens; k_b_proj from bf16 24.0 and 23.5 at 512
#: (H200, 2026-12-01, Triton 3.6, results/nvidia_h200/kernel_variants.json, bmm_in_flight).
IN_FLIGHT = gl.constexpr(2)


@gluon.jit
def _share(items):
    """First item and the one after the last of this program: neighbours, so that it meets few heads."""
    p = gl.program_id(0)
    programs = gl.num_programs(0)
    return (p.to(gl.int64) * items // programs).to(gl.int32), ((p + 1).to(gl.int64) * items // programs).to(gl.int32)


@gluon.jit
def _producer(
    P: gl.constexpr, a_desc, w_ptr, w_desc, scales, walk, rings,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, RULE: gl.constexpr, A_SLOTS: gl.constexpr, W_SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    KB: gl.constexpr = K // 128
    STEPS: gl.constexpr = KB * (N // 128)
    KEPT: gl.constexpr = STEPS <= W_SLOTS
    A_BYTES: gl.constexpr = 64 * 128 * a_desc.dtype.primitive_bitwidth // 8
    a_bufs, sa_bufs, w_bufs, a_full, a_empty, w_full, w_empty = rings
    sa_ptr, _, stride_sah, stride_sam, stride_sak = scales
    tokens, items, head_rows, head_columns = walk
    m_tiles = (tokens + ROWS - 1) // ROWS
    start, end = _share(items)
    if PDL and P == 0:  # the predecessor may have written the weights, but those of the first head may come to the L2 already
        line = gl.arange(0, 128, gl.BlockedLayout([1], [32], [1], [0]))
        first = w_ptr + (start // m_tiles).to(gl.int64) * (N * K) + line * K
        PARTS: gl.constexpr = 1 if RULE == "given" and KB > 1 else STEPS if KEPT else W_SLOTS
        for part in gl.static_range(PARTS):
            prefetch_l2(first + part * (128 if KB > 1 else 16384), (line >= 0) & (start < end))
    if PDL:
        gdc_wait()
    ia = 0
    iw = 0
    before = -1
    for item in range(start, end):
        head = item // m_tiles
        row = item % m_tiles * ROWS + head * head_rows + P * 64
        column = head * head_columns
        if RULE == "given":
            r = item % m_tiles * ROWS + P * 64 + gl.arange(0, 64, gl.BlockedLayout([1], [32], [1], [0]))
            sas = sa_ptr + head.to(gl.int64) * stride_sah + gl.minimum(r, tokens - 1).to(gl.int64) * stride_sam
        for i in range(STEPS if P == 0 else KB):
            if i < KB:
                slot = P * A_SLOTS + (ia + i) % A_SLOTS
                bar = a_full.index(slot)
                mbarrier.wait(a_empty.index(slot), (((ia + i) // A_SLOTS) & 1) ^ 1)
                if A_SLOTS > IN_FLIGHT and ia + i >= IN_FLIGHT:
                    mbarrier.wait(a_full.index(P * A_SLOTS + (ia + i - IN_FLIGHT) % A_SLOTS), ((ia + i - IN_FLIGHT) // A_SLOTS) & 1)
                if RULE == "given":  # before the boxes: behind all that is asked for at the start they would come last
                    cp_async(sa_bufs.index(slot), sas + i * stride_sak.to(gl.int64))
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                mbarrier.expect(bar, A_BYTES)
                tma_load(a_desc, [row, column + i * 128], bar, a_bufs.index(slot))
            if P == 0:
                if head != before or not KEPT:
                    slot_w = i if KEPT else iw % W_SLOTS
                    turn = iw // STEPS if KEPT else iw // W_SLOTS
                    bar_w = w_full.index(slot_w)
                    mbarrier.wait(w_empty.index(slot_w), (turn & 1) ^ 1)
                    mbarrier.expect(bar_w, 128 * 128)
                    tma_load(w_desc, [head * N + i * 128, 0] if KB == 1 else [head * N, i * 128], bar_w, w_bufs.index(slot_w))
                    iw += 1
        ia += KB
        before = head
    if RULE == "given":
        async_copy.wait_group(0)


@gluon.jit
def _no_rows(at, rings, KB: gl.constexpr, STEPS: gl.constexpr, A_SLOTS: gl.constexpr, W_SLOTS: gl.constexpr, RING: gl.constexpr):
    """An item none of whose rows are this warpgroup's: its slots are freed as they come."""
    KEPT: gl.constexpr = STEPS <= W_SLOTS
    _, _, _, a_full, a_empty, w_full, w_empty = rings
    j, step, turn, last = at
    for i in range(STEPS):
        if i < KB:
            slot = (j * KB + i) % A_SLOTS
            mbarrier.wait(a_full.index(RING + slot), ((j * KB + i) // A_SLOTS) & 1)
            mbarrier.arrive(a_empty.index(RING + slot))
        if last or not KEPT:
            slot_w = i if KEPT else (step + i) % W_SLOTS
            mbarrier.wait(w_full.index(slot_w), (turn if KEPT else (step + i) // W_SLOTS) & 1)
            mbarrier.arrive(w_empty.index(slot_w))


@gluon.jit
def _consumer(
    WG: gl.constexpr, scales, out, tokens, items, rings, sums, stages,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, RULE: gl.constexpr, A_SLOTS: gl.constexpr, W_SLOTS: gl.constexpr, BOXED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = 0 if ROWS == 64 else WG
    KB: gl.constexpr = K // 128
    STEPS: gl.constexpr = KB * (N // 128)
    if PDL:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    step = 0  # of the item's first one
    turn = 0  # of the head
    j = 0
    m_tiles = (tokens + ROWS - 1) // ROWS
    start, end = _share(items)
    for item in range(start, end if WG < STEPS or ROWS > 64 else start):
        head = (item // m_tiles).to(gl.int64)
        t0 = item % m_tiles * ROWS
        last = (item + 1) % m_tiles == 0
        at = (j, step, turn, last)
        if HALF == 0 or t0 + HALF * 64 < tokens:
            _item(WG, scales, out, tokens, head, t0, at, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED)
        else:
            _no_rows(at, rings, KB, STEPS, A_SLOTS, W_SLOTS, HALF * A_SLOTS)
        step += STEPS
        j += 1
        turn += last.to(gl.int32)
    if BOXED:
        tma_store_wait(0)


@gluon.jit
def _free(bar):
    """Give a slot back of which something, if only its scales, was read into registers.

    ptxas moves the barrier up behind the last load, which plain stores allow: what TMA or cp.async write could overtake loads of other warps. Most
    likely the cause of one wrong result in 2937 tests without the fence (H200, 2026-12-01, Triton 3.6).
    """
    fence_async_shared()
    mbarrier.arrive(bar)


@gluon.jit
def _item(
    WG: gl.constexpr, scales, out, tokens, head, t0, at, rings, sums, stages,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, RULE: gl.constexpr, A_SLOTS: gl.constexpr, W_SLOTS: gl.constexpr, BOXED: gl.constexpr,
):  # fmt: skip
    sw_ptr = scales[1]
    out_ptr, out_desc, stride_om, out_rows, out_columns = out
    a_bufs, sa_bufs, w_bufs, a_full, a_empty, w_full, w_empty = rings
    sums, sums_full, sums_empty = sums
    j, step, turn, last = at
    STEPS: gl.constexpr = K // 128 * (N // 128)
    DEEP: gl.constexpr = K > 128
    TURN: gl.constexpr = 2 if ROWS == 64 else 1
    FIRST: gl.constexpr = WG if ROWS == 64 else 0
    HALF: gl.constexpr = 0 if ROWS == 64 else WG
    RING: gl.constexpr = HALF * A_SLOTS  # this warpgroup's slots, so that it need not keep step with the others
    VEC: gl.constexpr = 4 if out_ptr.dtype.element_ty == gl.float32 else 8
    KEPT: gl.constexpr = STEPS <= W_SLOTS  # a head's weights stay in the ring for all of its items
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    column: gl.constexpr = gl.SliceLayout(1, mma)
    row_out = t0 + head * out_rows
    column_out = head * out_columns
    if BOXED:
        row_out = row_out.to(gl.int32)
        column_out = column_out.to(gl.int32)
    # scales of the weights are asked for a step ahead: from the L2 they take longer than the product
    sws = sw_ptr + head * STEPS
    sw_next = gl.load(sws + FIRST)
    acc = gl.zeros((64, 128), gl.float32, mma)
    if not DEEP:
        slot = RING + j % A_SLOTS
        mbarrier.wait(a_full.index(slot), (j // A_SLOTS) & 1)
        if RULE == "given":
            a = a_bufs.index(slot)
            sa = sa_bufs.index(slot).load(column)
        else:
            a, sa = quantize_tile(a_bufs.index(slot), RULE, operand)
            sa = gl.convert_layout(sa, column)
            _free(a_empty.index(slot))
    for i in range(FIRST, STEPS, TURN):
        sw = sw_next
        sw_next = gl.load(sws + gl.minimum(i + TURN, STEPS - 1))
        if DEEP:
            slot_a = RING + (step + i) % A_SLOTS
            mbarrier.wait(a_full.index(slot_a), ((step + i) // A_SLOTS) & 1)
            if RULE == "given":
                a = a_bufs.index(slot_a)
                sa = sa_bufs.index(slot_a).load(column)
            else:
                a, sa = quantize_tile(a_bufs.index(slot_a), RULE, operand)
                sa = gl.convert_layout(sa, column)
                _free(a_empty.index(slot_a))
        slot_w = i if KEPT else (step + i) % W_SLOTS
        mbarrier.wait(w_full.index(slot_w), (turn if KEPT else (step + i) // W_SLOTS) & 1)
        # not the last product's registers: they would be live while the next block is quantized
        tmp = warpgroup_mma(a, w_bufs.index(slot_w).permute((1, 0)), gl.zeros((64, 128), gl.float32, mma), use_acc=False, is_async=True)
        p = sa * sw
        tmp = warpgroup_mma_wait(0, deps=[tmp])
        if last or not KEPT:
            mbarrier.arrive(w_empty.index(slot_w))
        if DEEP:
            if RULE == "given":
                _free(a_empty.index(slot_a))
            acc += tmp * p[:, None]
        else:
            y = (tmp * p[:, None]).to(out_ptr.dtype.element_ty)
            store_tile(out_ptr, out_desc, stages.index(HALF), y, row_out, HALF * 64, tokens - t0, column_out + i * 128, stride_om, 128, VEC, BOXED)
    if not DEEP and RULE == "given":
        _free(a_empty.index(slot))
    if DEEP and ROWS == 64:
        if WG == 1:
            mbarrier.wait(sums_empty, (j & 1) ^ 1)
            sums.store(acc)
            thread_barrier()
            mbarrier.arrive(sums_full)
        else:
            mbarrier.wait(sums_full, j & 1)
            acc += sums.load(mma)
            thread_barrier()
            mbarrier.arrive(sums_empty)
    if DEEP and (ROWS > 64 or WG == 0):
        y = acc.to(out_ptr.dtype.element_ty)
        store_tile(out_ptr, out_desc, stages.index(HALF), y, row_out, HALF * 64, tokens - t0, column_out, stride_om, 128, VEC, BOXED)


@gluon.jit(do_not_specialize=["tokens", "items", "head_rows", "head_columns", "stride_sah", "stride_sam", "stride_sak", "out_rows"])
def _bmm_hopper_kernel(
    a_desc, sa_ptr, w_ptr, w_desc, sw_ptr, out_ptr, out_desc, tokens, items, head_rows, head_columns,
    stride_sah, stride_sam, stride_sak, stride_om, out_rows, out_columns,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, RULE: gl.constexpr, A_SLOTS: gl.constexpr, W_SLOTS: gl.constexpr, BOXED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """K is 128 or N is 128. A head's rows lie `head_rows` rows and `head_columns` columns of `a_desc` after those of the head before; so for out."""
    BITS: gl.constexpr = a_desc.dtype.primitive_bitwidth
    boxes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    bytes_: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    DEEP: gl.constexpr = K > 128
    RINGS: gl.constexpr = ROWS // 64
    # consumers that take turns share no slot: neither the weights', nor, along K, the activation's
    W_READERS: gl.constexpr = RINGS
    A_READERS: gl.constexpr = 2 if ROWS == 64 and not DEEP and N > 128 else 1
    SUMS: gl.constexpr = 64 if DEEP and ROWS == 64 else 1
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [RINGS * A_SLOTS, 64, 128], boxes)
    sa_bufs = a_bufs
    if RULE == "given":
        sa_bufs = gl.allocate_shared_memory(gl.float32, [RINGS * A_SLOTS, 64], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [W_SLOTS, 128, 128], bytes_)
    sum_buf = gl.allocate_shared_memory(gl.float32, [SUMS, 128], gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0]))
    stages = a_bufs
    if BOXED:
        stages = gl.allocate_shared_memory(out_desc.dtype, [RINGS, 64, 128], out_desc.layout)
    a_full = gl.allocate_shared_memory(gl.int64, [RINGS * A_SLOTS, 1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [RINGS * A_SLOTS, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_SLOTS, 1], mbarrier.MBarrierLayout())
    sums_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RINGS * A_SLOTS):
        mbarrier.init(a_full.index(i), count=33 if RULE == "given" else 1)  # the expected bytes, and each lane's copies
        mbarrier.init(a_empty.index(i), count=A_READERS)
    for i in gl.static_range(W_SLOTS):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=W_READERS)
    mbarrier.init(sums_full, count=1)
    mbarrier.init(sums_empty, count=1)
    scales = (sa_ptr, sw_ptr, stride_sah, stride_sam, stride_sak)
    walk = (tokens, items, head_rows, head_columns)
    out = (out_ptr, out_desc, stride_om, out_rows, out_columns)
    rings = (a_bufs, sa_bufs, w_bufs, a_full, a_empty, w_full, w_empty)
    sums = (sum_buf, sums_full, sums_empty)
    if ROWS == 192:
        gl.warp_specialize(
            [
                (_consumer, (0, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_consumer, (1, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_consumer, (2, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_producer, (0, a_desc, w_ptr, w_desc, scales, walk, rings, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, PDL)),
                (_producer, (1, a_desc, w_ptr, w_desc, scales, walk, rings, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, PDL)),
                (_producer, (2, a_desc, w_ptr, w_desc, scales, walk, rings, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, PDL)),
            ],
            [4, 4, 1, 1, 1],
            [160, 160, 32, 32, 32],
        )
    elif ROWS == 128:
        gl.warp_specialize(
            [
                (_consumer, (0, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_consumer, (1, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_producer, (0, a_desc, w_ptr, w_desc, scales, walk, rings, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, PDL)),
                (_producer, (1, a_desc, w_ptr, w_desc, scales, walk, rings, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, PDL)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_consumer, (1, scales, out, tokens, items, rings, sums, stages, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, BOXED, PDL)),
                (_producer, (0, a_desc, w_ptr, w_desc, scales, walk, rings, N, K, ROWS, RULE, A_SLOTS, W_SLOTS, PDL)),
            ],
            [4, 1],
            [232, 40],
        )


_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_BOX16 = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch_bmm_hopper(
    a: torch.Tensor, a_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, rule: str,
    view: tuple[list[int], list[int], int, int],
) -> None:  # fmt: skip
    """Launch on given buffers that `bmm_config.kernel_for` calls "ring"; allocates nothing.

    Args:
        a: (T, heads, K), e4m3 bits with `a_scale` (T, heads, K / 128), or 16-bit, quantized by `rule`.
        w: (heads, N, K) contiguous; w_scale: contiguous.
        out: (T, heads, N), last stride 1.
        view: `bmm_config.view_of_heads` of a.
    """
    heads, n, k = w.shape
    tokens = a.shape[0]
    if tokens == 0 or heads == 0:
        return
    shape, strides, head_rows, head_columns = view
    a, w = as_e4m3(a), as_e4m3(w)
    bits = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * a.element_size(), rank=2)
    rows = hopper_rows(tokens, k, a.dtype, rule, out.dtype)
    items = heads * ceil_div(tokens, rows)
    stride_sam, stride_sah, stride_sak = (0, 0, 0) if a_scale is None else a_scale.stride()
    view_out = view_of_heads(out) if rows > 64 and out.element_size() == 2 else None
    out_desc, out_rows, out_columns = None, 0, out.stride(1)
    if view_out is not None:
        out_shape, out_strides, out_rows, out_columns = view_out
        out_desc = TensorDescriptor(out, out_shape, out_strides, [64, 128], _BOX16)
    launch(
        "bmm", _bmm_hopper_kernel, (ceil_div(items, ceil_div(items, arch_of(a.device).sms)),),
        TensorDescriptor(a, shape, strides, [64, 128], bits), a_scale, w,
        TensorDescriptor(w, [heads * n, k], [k, 1], [128, 128], _BOX), w_scale, out, out_desc,
        tokens, items, head_rows, head_columns, stride_sah, stride_sam, stride_sak, out.stride(0), out_rows, out_columns,
        N=n, K=k, ROWS=rows, RULE=rule, A_SLOTS=hopper_slots(rows, a.element_size(), out.element_size()), W_SLOTS=W_SLOTS, BOXED=out_desc is not None,
        num_warps=4, maxnreg=128 if rows == 192 else 168, enable_fp_fusion=True,
    )  # fmt: skip

"""Words of device memory that are zero before and after every kernel that uses them, and words that all kernels share (`shared_words`).

The former are for kernels whose programs draw tiles from a counter, or tell one another what is done: they find zeros and leave zeros, so that no
launch is spent on clearing. Two launches that can be in flight at once do not share words: eager launches of one stream follow one another and
share that stream's, each launch under CUDA graph capture has words of its own for as long as the process lives. (Streams are told apart by their
handles, as torch does; a graph that is instantiated twice must not be replayed twice at once.) The first launch with words on a device allocates,
once, and waits for the zeros.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

#: Words of one stream, and of a chunk: 4 MiB, enough for 130,000 captured launches that want a sector each, and for 7000 that want 18.
STREAM_WORDS, CHUNK_WORDS = 144, 1 << 20
#: What is handed out starts on a sector of its own.
SECTOR_WORDS = 8

_lock = threading.Lock()
_chunks: dict[torch.device, tuple[torch.Tensor, int]] = {}  # the current chunk, and how much of it is taken
_streams: dict[tuple[torch.device, int], torch.Tensor] = {}
_shared: dict[tuple[torch.device, int], torch.Tensor] = {}
_kept: list[torch.Tensor] = []  # chunks live as long as the process: graphs hold addresses in them


def zeroed_words(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32 zeros for one launch on the current stream, which has to leave zeros behind.

    Allocates where a stream is new or a chunk half used up; under capture never outside of the graph's pool: if no chunk has room, the zeros
    are the graph's own and it clears them with each replay.

    Args:
        device: a CUDA device with an index; on any other (compiling ahead) the zeros are new ones.
        words: at most 144.
    """
    if words > STREAM_WORDS:
        raise ValueError(f"zeroed_words: at most {STREAM_WORDS} words, got {words}")
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            taken = _take(device, words)
        return torch.zeros(words, dtype=torch.int32, device=device) if taken is None else taken
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    known = _streams.get(key)
    if known is None or _chunks[device][1] > CHUNK_WORDS // 2:
        with _lock:
            if device not in _chunks or _chunks[device][1] > CHUNK_WORDS // 2:
                chunk = _chunk(device, CHUNK_WORDS)
                _kept.append(chunk)
                _chunks[device] = (chunk, 0)
            known = _streams.get(key)
            if known is None:
                known = _take(device, STREAM_WORDS)
                assert known is not None
                _streams[key] = known
    return known[:words]


def shared_words(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32 that were zero once, the same ones for all streams and graphs of a device: programs claim parts of them by atomics.

    Allocates, and waits for the zeros, the first time for a device and a number of words; under capture without an earlier call the words are the
    graph's own and it clears them with each replay.
    """
    if device.type != "cuda":
        return torch.zeros(words, dtype=torch.int32, device=device)
    known = _shared.get((device, words))
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(words, dtype=torch.int32, device=device)
        with _lock:
            known = _shared.get((device, words))
            if known is None:
                known = _shared[device, words] = _chunk(device, words)
    return known


def _chunk(device: torch.device, words: int) -> torch.Tensor:
    """Zeros in no graph's memory.

    A thread of its own allocates: `torch.compile(mode="reduce-overhead")` warms up with its thread's allocations led into a graph's pool, and
    refuses what stays alive there.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_zeros, device, words).result()


def _zeros(device: torch.device, words: int) -> torch.Tensor:
    chunk = torch.zeros(words, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device).synchronize()  # every stream takes from it
    return chunk


def _take(device: torch.device, words: int) -> torch.Tensor | None:
    """The next words of the device's chunk, or None where it has no room for them."""
    chunk, first = _chunks.get(device, (None, 0))
    if chunk is None or first + words > chunk.numel():
        return None
    _chunks[device] = (chunk, first + -(-words // SECTOR_WORDS) * SECTOR_WORDS)
    return chunk[first : first + words]

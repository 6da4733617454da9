"""Words of device memory that are zero before and after every kernel that uses them.

For kernels whose programs draw tiles from a counter or wait for one another's flags: they find zeros and leave zeros, so that no launch is
spent on clearing. Two launches that can be in flight at once never share words: eager launches of one stream follow one another and share
that stream's, each launch under CUDA graph capture has words of its own for as long as the process lives.
"""

import threading

import torch

#: Words of one stream, and of a chunk: 4 MiB, enough for some thousand captured launches of a persistent kernel.
STREAM_WORDS, CHUNK_WORDS = 1024, 1 << 20
#: What is handed out starts on a sector of its own.
SECTOR_WORDS = 8

_lock = threading.Lock()
_chunks: dict[torch.device, tuple[torch.Tensor, int]] = {}  # the current chunk, and how much of it is taken
_streams: dict[tuple[torch.device, int], torch.Tensor] = {}
_kept: list[torch.Tensor] = []  # chunks live as long as the process: graphs hold addresses in them


def zeroed_words(device: torch.device, words: int) -> torch.Tensor:
    """(words,) int32 zeros for one launch on the current stream, which has to leave zeros behind.

    Allocates where a stream is new or a chunk is used up; under capture never outside of the graph's pool: if no chunk has room, the zeros
    are the graph's own and it clears them with each replay.

    Args:
        device: a CUDA device with an index; on any other (compiling ahead) the zeros are new ones.
        words: at most 1024.
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
    if known is None:
        with _lock:
            chunk, first = _chunks.get(device, (None, 0))
            if chunk is None or first > chunk.numel() // 2:
                chunk = torch.zeros(CHUNK_WORDS, dtype=torch.int32, device=device)
                torch.cuda.current_stream(device).synchronize()  # other streams take from it too
                _kept.append(chunk)
                _chunks[device] = (chunk, 0)
            known = _take(device, STREAM_WORDS)
            assert known is not None
            _streams[key] = known
    return known[:words]


def _take(device: torch.device, words: int) -> torch.Tensor | None:
    """The next words of the device's chunk, or None where it has no room for them."""
    chunk, first = _chunks.get(device, (None, 0))
    if chunk is None or first + words > chunk.numel():
        return None
    _chunks[device] = (chunk, first + -(-words // SECTOR_WORDS) * SECTOR_WORDS)
    return chunk[first : first + words]

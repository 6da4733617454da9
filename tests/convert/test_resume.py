"""WHOLE: a conversion that stopped goes on where it was, trusts nothing that it has not verified, and touches nothing that is not its own."""

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock

from moe_ops.convert import ConvertError, conversion, convert, journal, stream
from moe_ops.convert.report import size
from moe_ops.convert.source import STATE, read_source

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


class Stop(Exception):
    pass


@pytest.fixture
def stopped(pristine, tmp_path, monkeypatch):
    """Function: a destination whose conversion stopped after so many finished shards."""

    def run(finished, source=pristine, **options):
        out = tmp_path / "out"
        with monkeypatch.context() as patch:
            left = [finished]
            original = stream.FileWriter.finish

            def finish(self):
                if not left[0]:
                    raise Stop
                left[0] -= 1
                original(self)

            patch.setattr(stream.FileWriter, "finish", finish)
            # one after the other, so that the next one has begun but is not finished
            patch.setattr(stream, "ThreadPoolExecutor", lambda n, *a: ThreadPoolExecutor(1, *a))
            with pytest.raises(Stop):
                convert(source, out, threads=1, **options)
        return out

    return run


@pytest.fixture
def whole(pristine, tmp_path, content):
    convert(pristine, tmp_path / "whole")
    return content(tmp_path / "whole")


@pytest.mark.parametrize("finished", (0, 1, 2))
def test_resume_redoes_only_what_is_not_finished(finished, stopped, pristine, whole, content):
    out = stopped(finished)
    names = {p.name for p in out.iterdir()}
    assert INDEX not in names and "config.json" not in names
    assert sum(n in names for n in SHARDS) == finished and f"{SHARDS[finished]}.tmp" in names
    report = convert(pristine, out)
    assert report.resumed == tuple(SHARDS[:finished])
    assert ("went on from an earlier run" in report.text()) == bool(finished)
    assert not finished or f"{finished} of 3 files were finished, and verified" in report.text()
    # the rate is that of what this run did
    left = sum(t.nbytes for t in read_source(pristine).tensors.values() if t.file in SHARDS[finished:])
    assert report.bytes_done == left and f"{size(left / report.seconds)}/s" in report.text()
    assert content(out) == whole


def test_damaged_shard_is_done_again(stopped, pristine, whole, content):
    out = stopped(2)
    with open(out / SHARDS[0], "r+b") as f:
        f.seek(-5, os.SEEK_END)
        f.write(b"\x01")
    os.truncate(out / SHARDS[1], 100)
    assert convert(pristine, out).resumed == ()
    assert content(out) == whole


def test_shard_without_a_record_is_not_trusted(stopped, pristine, whole, content):
    """A kill between the rename and the journal's line."""
    out = stopped(2)
    path = out / STATE / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-7])  # the last line is torn
    assert convert(pristine, out).resumed == (SHARDS[0],)
    assert content(out) == whole


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"format": "fp8_block"}, "options.format was 'mxfp8' and is 'fp8_block'"),
        ({"rounding": "floor"}, "options.rounding was 'rceil' and is 'floor'"),
        ({"stochastic": 1}, "options.stochastic was None and is 1"),
        ({"exclude": ["re:.*q_proj"]}, "options.exclude"),
        ({"layout": "modelopt"}, "options.layout"),
    ),
)
@pytest.mark.parametrize("finished", (1, None), ids=("unfinished", "complete"))
def test_changed_options_are_refused(options, text, finished, stopped, pristine, tmp_path, content):
    if finished is None:
        out = tmp_path / "out"
        convert(pristine, out)
    else:
        out = stopped(finished)
    before = content(out)
    with pytest.raises(ConvertError) as error:
        convert(pristine, out, **options)
    assert text in str(error.value)
    after = content(out)
    after.pop(f"{STATE}/lock", None), before.pop(f"{STATE}/lock", None)
    assert after == before


def test_same_options_spelled_out_are_the_same(stopped, pristine, whole, content):
    out = stopped(1)
    convert(pristine, out, rounding="rceil", layout="hf", threads=3)
    assert content(out) == whole


def test_changed_source_is_refused(stopped, source):
    out = stopped(1, source)
    os.utime(source / SHARDS[2], ns=(1, 1))
    with pytest.raises(ConvertError, match=rf"of another source: files\.{SHARDS[2]}\.mtime_ns was \d+ and is 1;"):
        convert(source, out)


def test_WHOLE_other_weights_under_equal_headers_are_no_complete_result(source, tmp_path):
    """A fine-tuned model has the names, shapes and sizes of the one that it came from."""
    out = tmp_path / "out"
    convert(source, out)
    os.utime(source / SHARDS[1])
    assert convert(source, out).already_complete  # a copy, or a fresh download
    with open(source / SHARDS[1], "r+b") as f:  # one tensor of another value
        found = read_source(source).tensors["model.layers.1.self_attn.v_proj.weight"]
        f.seek(found.begin)
        raw = f.read(found.nbytes)
        f.seek(found.begin)
        f.write(raw[::-1])
    text = rf"out holds the conversion of other weights under the same names: source\.sample\.{SHARDS[1]} was"
    with pytest.raises(ConvertError, match=text):
        convert(source, out)


def test_complete_result_is_verified_and_left_alone(pristine, tmp_path, content):
    convert(pristine, tmp_path / "out")
    before = content(tmp_path / "out")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    report = convert(pristine, tmp_path / "out")
    assert report.already_complete and content(tmp_path / "out") == before
    assert "already complete" in report.text() and "everything: verify --against" in report.text()
    assert stamps == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    with open(tmp_path / "out" / SHARDS[1], "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\x55")
    with pytest.raises(ConvertError, match=f"{SHARDS[1]} is damaged"):
        convert(pristine, tmp_path / "out")


def test_stop_while_publishing(pristine, tmp_path, whole, content, monkeypatch):
    """The index is the last file; without it nothing else is taken for a model."""
    written = []
    original = conversion.publish.__globals__["write_file"]

    def until(path, data):
        if path.name == INDEX:
            raise Stop
        written.append(path.name)
        original(path, data)

    with monkeypatch.context() as patch:
        patch.setitem(conversion.publish.__globals__, "write_file", until)
        with pytest.raises(Stop):
            convert(pristine, tmp_path / "out")
    assert written == ["README.md", "config.json", "moe_ops_convert.json"] and not (tmp_path / "out" / INDEX).exists()
    assert convert(pristine, tmp_path / "out").resumed == tuple(SHARDS)
    assert content(tmp_path / "out") == whole


def test_single_file_gets_its_name_last(single, tmp_path, monkeypatch):
    convert(single, tmp_path / "whole")

    def stop(*args):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setitem(conversion.publish.__globals__, "manifest", stop)
        with pytest.raises(Stop):
            convert(single, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / "model.safetensors").exists()
    assert convert(single, tmp_path / "out").resumed == ("model.safetensors",)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_one_process_at_a_time(stopped, pristine):
    out = stopped(1)
    with FileLock(out / STATE / "lock"), pytest.raises(ConvertError, match="another process is converting"):
        convert(pristine, out)
    convert(pristine, out)


def test_destination_that_holds_something_else(pristine, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert(pristine, out)  # empty is fine
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.txt").write_text("the only copy")
    with pytest.raises(ConvertError, match="not empty and holds no conversion"):
        convert(pristine, out)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConvertError, match="is no folder"):
        convert(pristine, out / "thesis.txt")


@pytest.mark.parametrize("where", (".", "sub", ".."))
def test_destination_is_not_the_source(where, source, content):
    before = content(source)
    with pytest.raises(ConvertError, match="must lie outside the source"):
        convert(source, source / where)
    assert content(source) == before


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="no statvfs here")
def test_too_little_space_is_seen_before_anything_is_written(pristine, tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 10  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    for dry_run in (False, True):
        with pytest.raises(ConvertError, match=r"needs \d+ bytes .* but only \d+ are free"):
            convert(pristine, tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out").exists()  # other options, which need less, are free to come next


FULL = """
import resource, signal, sys
from moe_ops.convert import ConvertError, convert
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), before[1]))
try:
    convert(sys.argv[1], sys.argv[2])
except ConvertError as error:
    print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    convert(sys.argv[1], sys.argv[2])
"""


def test_a_write_that_fails_says_what_it_needs_and_the_next_run_goes_on(pristine, tmp_path, whole, content):
    """The limit on a file's size stands for a full disk: the write comes back with an error in the middle of a shard."""
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", FULL, pristine, out, "300000"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cannot write" in done.stdout and ".safetensors.tmp" in done.stdout and "needs" in done.stdout and "make room" in done.stdout
    assert content(out) == whole


@pytest.mark.parametrize("full", ("opening", "recording"))
def test_a_journal_that_cannot_be_written(full, pristine, tmp_path, whole, content, monkeypatch):
    out = tmp_path / "out"

    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write_file" if full == "opening" else "_line", no_space)
        with pytest.raises(ConvertError, match=r"journal.jsonl: No space left on device; the same command goes on"):
            convert(pristine, out)
    assert not (out / INDEX).exists()
    convert(pristine, out)
    assert content(out) == whole


def test_journal_is_json_lines(stopped):
    out = stopped(2)
    lines = [json.loads(line) for line in (out / STATE / "journal.jsonl").read_text().splitlines()]
    assert lines[0]["options"]["format"] == "mxfp8" and [r["file"] for r in lines[1:]] == SHARDS[:2]


@pytest.mark.parametrize("name", ("config.json", "tokenizer.json", "assets/chat.jinja", "README.md", INDEX, SHARDS[0]))
def test_a_complete_result_is_more_than_its_weights(name, pristine, tmp_path):
    convert(pristine, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    with pytest.raises(ConvertError, match=name):
        convert(pristine, tmp_path / "out")


def test_killed_while_the_journal_is_removed(pristine, tmp_path, whole, content):
    """The result is whole and published then; another command must not take it for something unfinished of its own."""
    out = tmp_path / "out"
    convert(pristine, out)
    (out / STATE).mkdir()
    (out / STATE / "lock").touch()
    with pytest.raises(ConvertError, match="holds another conversion: options.format was 'mxfp8'"):
        convert(pristine, out, format="fp8_block")
    assert {k: v for k, v in content(out).items() if not k.startswith(STATE)} == whole
    stamps = {p: p.stat().st_mtime_ns for p in out.iterdir() if p.is_file()}
    assert convert(pristine, out).already_complete and content(out) == whole
    assert stamps == {p: p.stat().st_mtime_ns for p in out.iterdir() if p.is_file()}


def test_a_lock_that_its_holder_removed_is_not_taken(pristine, tmp_path, monkeypatch):
    """The other process finished between our opening of the file and our locking of it."""

    class Late(FileLock):
        def acquire(self, *args, **kwargs):
            found = super().acquire(*args, **kwargs)
            os.unlink(self.lock_file)
            return found

    monkeypatch.setattr(journal, "FileLock", Late)
    with pytest.raises(ConvertError, match="has just finished"):
        convert(pristine, tmp_path / "out")


def test_a_published_result_that_was_damaged_is_unpublished_first(pristine, tmp_path, whole, content, monkeypatch):
    """Killed after the index was written, before the journal went; then a shard was damaged."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "remove", lambda self: None)
        convert(pristine, out)
    os.truncate(out / SHARDS[1], 100)
    seen = []
    original = stream.FileWriter.__init__
    monkeypatch.setattr(stream.FileWriter, "__init__", lambda self, *a: (seen.append((out / INDEX).exists()), original(self, *a))[1])
    convert(pristine, out)
    assert seen == [False] and content(out) == whole

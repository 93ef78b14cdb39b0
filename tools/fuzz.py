"""Attack the decoder for a while: `fuzz.py --seconds 600 [--target decode] [--keep] [--replay FILE …]`.

The time is shared by the targets (see tests/fuzz/targets.py), one after the other. Each begins with the inputs that
are kept in tests/fuzz/corpus and with what earlier runs left in build/fuzz. Afterwards every input goes through the
kernels once more, compiled with bounds checks. Whatever is found is written to build/fuzz, with its input in hex in
the log beside it; put the file into the corpus together with the fix, and a test replays it for good.

`--keep` puts those new inputs into the corpus that reach code which no kept one reaches.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS, WORK = ROOT / "tests" / "fuzz" / "corpus", ROOT / "build" / "fuzz"
GRACE_SECONDS = 180
"""For a start, and for an input that is stopped by its own limit."""
KEEP_SECONDS_MAX = 900
TARGETS = ("decode", "read", "value", "copy")
_RUNS = re.compile(r"stat::number_of_executed_units: (\d+)")


def main(arguments: list[str]) -> int:
    """Attack, and say what was tried and found; 0 if nothing was."""
    parser = argparse.ArgumentParser(description="Attack the decoder for a while.")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one")
    parser.add_argument("--keep", action="store_true", help="put what reaches new code into the corpus")
    parser.add_argument("--replay", nargs="+", type=Path, metavar="FILE", help="only run these inputs of one target")
    given = parser.parse_args(arguments)
    targets = given.target or list(TARGETS)
    # Run as a script, only this folder is on the path.
    sys.path.insert(0, str(ROOT))
    if given.replay:
        return 0 if all(_replayed(targets[0], path) for path in given.replay) else 1
    _get_atheris()
    seconds = max(1, given.seconds // len(targets))
    # Every target has its turn, whatever was found before.
    clean = [_attacked(target, seconds) for target in targets]
    clean += [_checked(target) for target in targets]
    if given.keep:
        for target in targets:
            _keep(target)
    print(f"fuzz: {'nothing found' if all(clean) else 'FOUND SOMETHING: see above'}")
    return 0 if all(clean) else 1


def _get_atheris() -> None:
    if importlib.util.find_spec("atheris"):
        return
    target = f"{ROOT}[fuzz]"
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    subprocess.run([*install, "--quiet", "--editable", target], check=True, cwd=ROOT)
    importlib.invalidate_caches()
    if not importlib.util.find_spec("atheris"):
        sys.exit("error: atheris has no build for this machine\nhint: It needs Linux (x86-64) and Python 3.11 to 3.13.")


def _attacked(target: str, seconds: int) -> bool:
    """Look for new inputs for so long; whether nothing was found."""
    from tests.fuzz.judge import Engine

    folder, log = WORK / target, WORK / f"{target}.log"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (CORPUS / target).iterdir():
        shutil.copy(path, folder / path.name)
    begun = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.guided", target, str(folder), str(seconds)]
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=Engine.INTERPRETED.environment(),
                stdout=file,
                stderr=file,
                check=False,
                timeout=seconds + GRACE_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    said = log.read_text(errors="replace")
    runs = _RUNS.search(said)
    print(
        f"fuzz: {target}: {runs[1] if runs else '?'} inputs in {time.monotonic() - begun:.0f} s, "
        f"{len(list(folder.iterdir()))} worth keeping, {'clean' if code == 0 else 'FOUND SOMETHING'}",
        flush=True,
    )
    if code != 0:
        print(f"{said[-6000:]}\nfuzz: all of it is in {log}, the input in {WORK}/{target}-found-*", flush=True)
    return code == 0


def _checked(target: str) -> bool:
    """Every input once more, with every index checked; whether all went well."""
    from tests.fuzz.judge import Engine, Fell, Judge

    paths, fell = sorted((WORK / target).iterdir()), 0
    with Judge(Engine.CHECKED) as checked, Judge(Engine.COMPILED) as compiled:
        for path in paths:
            data = path.read_bytes()
            try:
                one, other = checked.outcome(target, data), compiled.outcome(target, data)
                if one != other:
                    raise Fell(target, data, f"{one!r} with bounds checks, {other!r} without")
            except Fell as found:
                fell += 1
                shutil.copy(path, WORK / f"{target}-found-{path.name}")
                print(f"fuzz: {target}: {path}: {found}", flush=True)
    print(f"fuzz: {target}: {len(paths)} inputs with bounds checks, {fell or 'none'} fell", flush=True)
    return not fell


def _keep(target: str) -> None:
    from tests.fuzz.judge import Engine

    kept = CORPUS / target
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.reach", target, str(kept), str(WORK / target)],
        cwd=ROOT,
        check=True,
        env=Engine.INTERPRETED.environment(),
        capture_output=True,
        text=True,
        timeout=KEEP_SECONDS_MAX,
    )
    new = [Path(line) for line in done.stdout.splitlines() if not Path(line).is_relative_to(kept)]
    for path in new:
        data = path.read_bytes()
        (kept / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"fuzz: {target}: {len(new)} new in the corpus", flush=True)


def _replayed(target: str, path: Path) -> bool:
    from tests.fuzz.judge import Engine, Fell, Judge

    outcomes = set()
    for engine in Engine:
        with Judge(engine) as judge:
            try:
                found = judge.outcome(target, path.read_bytes()).decode()
            except Fell as fell:
                found = f"FELL: {fell}"
        print(f"{path}: {engine.value}: {found}")
        outcomes.add(found)
    return len(outcomes) == 1 and not outcomes.pop().startswith("FELL")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

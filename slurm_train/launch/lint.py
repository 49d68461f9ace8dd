"""Find in an sbatch script what Slurm takes without a word and what then goes wrong (manuals of sbatch and srun).

`python -m slurm_train.launch.lint FILE...` prints a line for each finding and exits 2 if there is any. A shell script
can hide more than is looked at here; what is reported is meant to be true.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import EXIT_OK, EXIT_USER

DIRECTIVE = "#SBATCH"

_SHORT = {"o": "output", "e": "error", "D": "chdir", "c": "cpus-per-task"}
"""Short options that are looked at, and their long names."""

_RANKS = re.compile(r"python|torchrun|slurm_train|submitit|accelerate", re.IGNORECASE)
"""A word by which a program is known to be training, rather than `srun hostname`."""


@dataclass(frozen=True)
class _Line:
    """A command or a comment, with the number of its first line; what is continued counts as one."""

    number: int
    text: str

    @property
    def words(self) -> list[str]:
        """Its words as the shell splits them; roughly, for what only bash understands."""
        try:
            return shlex.split(self.text, comments=True)
        except ValueError:
            return self.text.split()


def lint(text: str, exists: Callable[[str], bool] = os.path.isdir) -> list[str]:
    """The findings in a script: `LINE: what is wrong; remedy`, in the order of the lines.

    Args:
        text: the script.
        exists: whether a directory is there, relative to where the job would be submitted.
    """
    if "\r\n" in text:
        number = text[: text.index("\r\n")].count("\n") + 1
        return [f"{number}: Windows line ends, with which sbatch refuses it; convert it: sed -i 's/\\r$//' FILE"]
    lines = list(_lines(text))
    first = next((index for index, line in enumerate(lines) if not line.text.startswith("#")), len(lines))
    head, body = lines[:first], [line for line in lines[first:] if not line.text.startswith("#")]
    directives = [line for line in head if line.text.startswith(DIRECTIVE)]
    options = {name: (line.number, value) for line in directives for name, value in _options(line)}
    found = [
        *_shebang(text),
        *_late(lines[first:]),
        *(finding for line in head for finding in _spelling(line)),
        *_appending(options),
        *_directories(options, exists),
        *_signal(options, body),
        *_environment(options, body),
        *_cpus(options, body),
        *_exit_code(body),
    ]
    return [f"{number}: {words}" for number, words in sorted(found)]


_Finding = tuple[int, str]
_Options = dict[str, tuple[int, str]]


def _lines(text: str) -> Iterator[_Line]:
    """Commands and comments, without empty lines and the text of here-documents."""
    pending, end = _Line(0, ""), ""
    for number, line in enumerate(text.splitlines(), 1):
        if end:
            end = "" if line.strip() == end else end
            continue
        if not pending.text and (not line.strip() or line.startswith("#")):
            if line.strip():
                yield _Line(number, line)
            continue
        pending = _Line(pending.number or number, f"{pending.text}\n{line}" if pending.text else line)
        if _is_whole(pending.text):
            here = re.search(r"(?<!<)<<-?\s*['\"]?([A-Za-z_]\w*)", pending.text)
            end = here[1] if here else ""
            yield _Line(pending.number, pending.text.replace("\\\n", " ").strip())
            pending = _Line(0, "")
    if pending.text:
        yield pending


def _is_whole(command: str) -> bool:
    """Whether a command ends here: neither continued by a backslash nor inside quotes."""
    if re.search(r"(?<!\\)(\\\\)*\\$", command):
        return False
    for comments in (True, False):  # an apostrophe in a comment opens no quotes; a # in quotes no comment
        try:
            shlex.split(command, comments=comments)
            return True
        except ValueError:
            continue
    return False


def _options(line: _Line) -> Iterator[tuple[str, str]]:
    """Long names and values of a directive's options."""
    words = iter(_Line(0, line.text[len(DIRECTIVE) :]).words)
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            yield name, value
        elif word.startswith("-"):
            yield _SHORT.get(word[1:2], word[1:2]), word[2:] or next(words, "")


def _shebang(text: str) -> Iterator[_Finding]:
    if not text.startswith("#!"):
        yield 1, "no interpreter, without which sbatch refuses it; begin with #!/bin/bash"


def _late(lines: Sequence[_Line]) -> Iterator[_Finding]:
    for line in lines:
        if line.text.startswith(DIRECTIVE):
            yield line.number, "#SBATCH after the first command is ignored; move it to the top"


def _spelling(line: _Line) -> Iterator[_Finding]:
    """A directive whose words are not what they look like."""
    if re.match(r"#+\s+SBATCH\s+-|#(sbatch|Sbatch)(\s+-\S+)+\s*$", line.text):
        yield line.number, f"a comment, not a directive; write {DIRECTIVE}, or ##SBATCH to leave it out"
    if not line.text.startswith(DIRECTIVE):
        return
    rest = line.text[len(DIRECTIVE) :]
    try:
        words = shlex.split(rest.rstrip().removesuffix("\\"), comments=True)
    except ValueError:
        yield line.number, "a quotation mark is not closed; sbatch refuses the script"
        return
    if re.search(r"\\\s*$", rest):
        yield line.number, "a directive ends with its line, whatever stands on the next; repeat #SBATCH there"
    if re.search(r"[^\s'\"]#", re.sub(r"'[^']*'|\"[^\"]*\"", "", rest)):
        yield line.number, "sbatch cuts the value off at #; put it in quotes"
    if stray := _stray(words):
        yield line.number, f"{stray!r} belongs to no option; put a value with spaces in quotes, and none around ="
    double_only = re.sub(r"'[^']*'|(\"[^\"]*\")", lambda match: match[1] or "", rest)
    if re.search(r"\$[{(A-Za-z_]|`|=\"?~", double_only):
        yield line.number, "no shell reads this line, so $ and ~ stay as they are; write the value itself"


def _stray(words: Sequence[str]) -> str:
    """The first word that is neither an option nor its value; empty if there is none."""
    may_be_value = False
    for word in words:
        if not word.startswith("-"):
            if not may_be_value or word == "=":
                return word
            may_be_value = False
        else:
            may_be_value = "=" not in word if word.startswith("--") else len(word) == 2
    return ""


def _appending(options: _Options) -> Iterator[_Finding]:
    if "requeue" in options and options.get("open-mode", (0, ""))[1] != "append":
        number = options["requeue"][0]
        yield number, "a requeued job begins its log anew, and the first part is lost; add #SBATCH --open-mode=append"


def _directories(options: _Options, exists: Callable[[str], bool]) -> Iterator[_Finding]:
    """Slurm makes no directories: a job that cannot open its log ends at once, and says nothing anywhere."""
    for name in ("output", "error"):
        number, value = options.get(name, (0, ""))
        directory = os.path.dirname(os.path.join(options.get("chdir", (0, ""))[1], value))
        per_job = re.search(r"(?<!%)(%%)*%\d*[jJA]", directory)
        unknown = re.search(r"(?<!%)(%%)*%\d*\w|[$~]", directory)
        path = directory.replace("%%", "%")
        if per_job or (path and not unknown and not exists(path)):
            yield (
                number,
                f"there is no directory {path}, and Slurm makes none: the job ends without a word; make it first",
            )


def _signal(options: _Options, body: Sequence[_Line]) -> Iterator[_Finding]:
    number, value = options.get("signal", (0, ""))
    shell_alone = "B" in value.upper().partition(":")[0] and ":" in value
    if shell_alone and not any("trap" in line.words for line in body):
        yield number, "B: sends the signal to this shell alone, and no rank saves; leave B: out"


def _environment(options: _Options, body: Sequence[_Line]) -> Iterator[_Finding]:
    value = options.get("export", (0, ""))[1]
    if value.upper() not in ("NONE", "NIL") or any("SLURM_EXPORT_ENV" in line.text for line in body):
        return
    for line, words in _sruns(body):
        if not any(word.startswith("--export") for word in words):
            yield line.number, f"after --export={value} the ranks get nothing of what is set here; add --export=ALL"


def _cpus(options: _Options, body: Sequence[_Line]) -> Iterator[_Finding]:
    if "cpus-per-gpu" in options or any("SRUN_CPUS_PER_TASK" in line.text for line in body):
        return
    for line, words in _sruns(body):
        if not any(re.search(r"^-c|--cpus-per-(task|gpu)", word) for word in words):
            yield (
                line.number,
                "srun takes no --cpus-per-task from sbatch since Slurm 22.05: a rank has one CPU; "
                "add ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}",
            )


def _exit_code(body: Sequence[_Line]) -> Iterator[_Finding]:
    last = max((line.number for line, _ in _sruns(body)), default=0)
    after = [line for line in body if last and line.number > last]
    keeps = r"\$\?|PIPESTATUS|(^|[\s;])(set\s+-\w*e\w*|trap|exit|wait)\b"
    if after and not any(re.search(keeps, line.text) for line in body):
        words = "the job ends with this command's exit code: a run that failed counts as COMPLETED"
        yield after[-1].number, f"{words}; end with srun, or keep its code: code=$? and exit $code"


def _sruns(body: Sequence[_Line]) -> Iterator[tuple[_Line, list[str]]]:
    """The commands by which srun starts ranks, and their words between srun and the program."""
    for line in body:
        words = line.words
        start = next((index for index, word in enumerate(words) if word.rpartition("/")[2] == "srun"), len(words))
        rest = words[start + 1 :]
        end = next((index for index, word in enumerate(rest) if word[:1] != "-" and _RANKS.search(word)), None)
        if end is not None and words[0] not in ("echo", "printf"):
            yield line, rest[:end]


def main(paths: Sequence[str]) -> int:
    """Print the findings in some files; returns the exit code."""
    if not paths:
        print("usage: python -m slurm_train.launch.lint FILE...", file=sys.stderr)
        return EXIT_USER
    code = EXIT_OK
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8", "replace")
        except OSError as error:
            print(f"{path}: {error.strerror}", file=sys.stderr)
            code = EXIT_USER
            continue
        for finding in lint(text):
            print(f"{path}:{finding}")
            code = EXIT_USER
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

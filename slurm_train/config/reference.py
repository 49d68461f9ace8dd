"""The config reference as Markdown, made from the docstrings under the schema's fields.

python -m slurm_train.config.reference
"""

from __future__ import annotations

import ast
import inspect

from slurm_train.config import launcher_schema, schema

_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}


def field_docstrings() -> dict[str, dict[str, tuple[str, str, str]]]:
    """Class -> field -> (type, default, docstring), as written in the schema; a docstring is "" where it lacks."""
    statements = [node for module in (schema, launcher_schema) for node in ast.parse(inspect.getsource(module)).body]
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for node in statements:
        if isinstance(node, ast.ClassDef):
            following = [*node.body[1:], None]
            found[node.name] = {
                item.target.id: (ast.unparse(item.annotation), _default(item.value), _text(after))
                for item, after in zip(node.body, following, strict=True)
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return found


def reference() -> str:
    """The whole reference: one table for each section, keys as they are typed."""
    classes = field_docstrings()
    lines = ["# Config reference", ""]
    lines += ["Type `KEY=VALUE` on the command line, or put the keys into a config file of your own."]
    _section(lines, classes, "Config", "")
    return "\n".join(lines) + "\n"


def _section(lines: list[str], classes: dict[str, dict[str, tuple[str, str, str]]], name: str, prefix: str) -> None:
    lines += ["", f"## {prefix.removesuffix('.') or 'Top level'}", ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field, (kind, default, text) in classes[name].items():
        cells = [f"`{prefix}{field}`", "section" if kind in classes else f"`{kind}`", default, text]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for field, (kind, _, _) in classes[name].items():
        if kind in classes:
            _section(lines, classes, kind, f"{prefix}{field}.")


def _default(value: ast.expr | None) -> str:
    """A default as typed; a factory's is what it makes."""
    if isinstance(value, ast.Call):
        factory = next((keyword.value for keyword in value.keywords if keyword.arg == "default_factory"), None)
        if isinstance(factory, ast.Lambda):
            return f"`{ast.unparse(factory.body)}`"
        return "`{}`" if isinstance(factory, ast.Name) and factory.id == "dict" else ""
    if value is None or (isinstance(value, ast.Name) and value.id == "MISSING"):
        return "from the group's file"
    text = ast.unparse(value).strip("'")
    return f"`{_YAML_WORDS.get(text, text)}`"


def _text(node: ast.stmt | None) -> str:
    """The docstring that a statement is, on one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


if __name__ == "__main__":
    print(reference(), end="")

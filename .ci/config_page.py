"""Prints the text of ``docs/configuration.md``, made from the options' types and descriptions."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize

from kvshelf.config import PROCESS_VARIABLES, Config, variable_of


def _type_text(annotation: Any) -> str:
    """Return the name of a field's type for the page."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(a) for a in arguments if a is not types.NoneType)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", ByteSize: "size"}
    return names.get(origin or annotation, "mapping")


def _default_text(default: object) -> str:
    if default is None:
        return "none"
    if isinstance(default, ByteSize):
        return f"`{default.human_readable(separator='')}`".replace(".0", "")
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, dict | BaseModel):
        return "`{}`"
    return f"`{default}`"


_PAGE_HEAD = """\
<!-- Generated from src/kvshelf/config.py by `make docs`; do not edit. -->
# Configuration

Every option has a default except the shelf's path or URL. Without that, kvshelf starts with a
private directory and logs a warning. Most set-ups need one line:

```json
{"shared_storage_path": "/mnt/kv"}
```

## Where options come from

Each option is read from three sources. The first source that sets it has precedence.

1. `kv_connector_extra_config` of vLLM's `--kv-transfer-config`:

    ```bash
    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KVShelfConnector",
      "kv_role": "kv_both",
      "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv", "chunk_size": 512}}'
    ```

2. The environment: the option's name in capitals after `KVSHELF_`, as in
   `KVSHELF_CHUNK_SIZE=512`. An empty variable counts as not set.
3. A YAML file, named by the key `config_file` in `kv_connector_extra_config` or by the variable
   `KVSHELF_CONFIG`:

    ```yaml
    shared_storage_path: /mnt/kv
    chunk_size: 512
    memory: 20GiB
    ```

Nothing is ignored. Misspelt keys and variables, invalid values and contradicting options stop
the engine at start, with a message that names each of them, its source and the probable intention.
The only exception are the variables that Kubernetes makes for a Service whose name begins with
`kvshelf` (`KVSHELF_SERVICE_HOST`, `KVSHELF_PROXY_PORT_80_TCP`, …): where the whole set of a Service
is there, they are ignored, and one line of the log says so.

## All options

| option | type | default |
|---|---|---|
"""


def descriptions() -> dict[str, str]:
    """Return the text below each option in the source.

    pydantic can read it too, but then each process that imports the options does.
    """
    [model] = ast.parse(inspect.getsource(Config)).body
    assert isinstance(model, ast.ClassDef)
    texts = {}
    for option, below in zip(model.body, model.body[1:], strict=False):
        match option, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def render_page() -> str:
    """Return the text of ``docs/configuration.md``."""
    rows, sections = [], []
    texts = descriptions()
    for name, field in Config.model_fields.items():
        kind = _type_text(field.annotation)
        default = _default_text(field.get_default(call_default_factory=True))
        rows.append(f"| [`{name}`](#{name}) | {kind} | {default} |\n")
        sections.append(
            f"\n### `{name}` {{ #{name} }}\n\n"
            f"{texts[name]}\n\n"
            f"Variable: `{variable_of(name)}`. Default: {default}.\n"
        )
    processes = "".join(f"| `{name}` | {text} |\n" for name, text in PROCESS_VARIABLES.items())
    return (
        _PAGE_HEAD
        + "".join(rows)
        + "".join(sections)
        + "\n## Variables of a process\n\n"
        + "These configure a process, not a shelf, and exist only as environment variables.\n\n"
        + "| variable | meaning |\n|---|---|\n"
        + processes
    )


if __name__ == "__main__":
    print(render_page(), end="")

"""Plans on disk: JSON for people and other programs, and a compact binary form. Neither can run code when it is
read.
"""

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.certificate import Certificate
from reshard.copy_table import COLUMN_TYPES, WIDE_COLUMNS, CopyTable
from reshard.dtype import DType
from reshard.errors import LayoutError, PlanError
from reshard.layout_merge import layout_from_bytes, layout_to_bytes
from reshard.plan import Plan, PlanInputs
from reshard.plan_digest import FORMAT_VERSION
from reshard.topology import Topology

_MAGIC = b"RSPLAN1\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, atomically: JSON when the name ends in ``.json``, else binary (zlib over a JSON head and
    columns).
    """
    path = Path(path)
    data = plan_to_json(plan).encode() if path.suffix == ".json" else plan_to_bytes(plan)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def load_plan(path: str | Path) -> Plan:
    """Read either form; PlanError when the file is no plan, is damaged, or is of another version."""
    data = Path(path).read_bytes()
    try:
        return plan_from_bytes(data) if data.startswith(_MAGIC) else plan_from_json(data.decode())
    except (KeyError, TypeError, ValueError, AssertionError, zlib.error) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path} is not a plan or is damaged: {error}") from error


def plan_to_bytes(plan: Plan) -> bytes:
    """The binary form; ends with the content digest, which ``plan_from_bytes`` checks."""
    head, blobs = _head(plan), _layout_blobs(plan)
    head["layouts"] = [len(blob) for blob in blobs]
    text = json.dumps(head, separators=(",", ":")).encode()
    columns = b"".join(np.ascontiguousarray(array).tobytes() for array in plan.table.columns().values())
    body = len(text).to_bytes(8, "little") + text + b"".join(blobs) + columns
    return _MAGIC + zlib.compress(body, 3)


def plan_from_bytes(data: bytes) -> Plan:
    """Inverse of ``plan_to_bytes``."""
    body = zlib.decompress(data[len(_MAGIC) :])
    size = int.from_bytes(body[:8], "little")
    head = json.loads(body[8 : 8 + size])
    _check_version(head)
    at = 8 + size
    blobs = []
    for length in head["layouts"]:
        blobs.append(body[at : at + length])
        at += length
    columns = {}
    for name, kind in COLUMN_TYPES.items():
        count = head["num"] * (head["max_ndim"] if name in WIDE_COLUMNS else 1)
        array = np.frombuffer(body, kind, count, offset=at)
        columns[name] = array.reshape(head["num"], -1) if name in WIDE_COLUMNS and head["num"] else array
        at += array.nbytes
    return _plan(head, blobs, columns)


def plan_to_json(plan: Plan) -> str:
    """The JSON form: readable copies by column, the layouts as base64 of their own compact form."""
    head = _head(plan)
    head["layouts"] = [base64.b64encode(blob).decode() for blob in _layout_blobs(plan)]
    head["columns"] = {name: array.tolist() for name, array in plan.table.columns().items()}
    return json.dumps(head, indent=1)


def plan_from_json(text: str) -> Plan:
    """Inverse of ``plan_to_json``."""
    head = json.loads(text)
    if not isinstance(head, dict):
        raise PlanError("not a plan: expected a JSON object")
    _check_version(head)
    columns = {name: np.array(head["columns"][name], kind) for name, kind in COLUMN_TYPES.items()}
    return _plan(head, [base64.b64decode(blob) for blob in head["layouts"]], columns)


def _layout_blobs(plan: Plan) -> list[bytes]:
    return [layout_to_bytes(plan.source), layout_to_bytes(plan.destination)]


def _head(plan: Plan) -> dict[str, Any]:
    inputs, cert = plan.inputs, plan.certificate
    return {
        "format": "reshard plan",
        "version": FORMAT_VERSION,
        "digest": plan.digest,
        "content_digest": plan.content_digest,
        "num": plan.table.num,
        "max_ndim": plan.table.start.shape[1],
        "names": plan.table.names,
        "storages": plan.table.storages,
        "casts": sorted([a.value, b.value] for a, b in inputs.casts),
        "topology": None if inputs.topology is None else inputs.topology.to_json(),
        "ignore": inputs.ignore,
        "ranks": inputs.ranks,
        "certificate": {
            "ranks": list(cert.needed_bytes),
            "needed_bytes": list(cert.needed_bytes.values()),
            "held_bytes": list(cert.held_bytes.values()),
            "nodes": list(cert.node_floor_bytes),
            "node_floor_bytes": list(cert.node_floor_bytes.values()),
        },
    }


def _check_version(head: dict[str, Any]) -> None:
    if head.get("format") != "reshard plan" or head.get("version") != FORMAT_VERSION:
        raise PlanError(
            f"expected a 'reshard plan' of version {FORMAT_VERSION}, got {head.get('format')!r} of version "
            f"{head.get('version')!r}: make the plan again"
        )


def _plan(fields: dict[str, Any], blobs: list[bytes], columns: dict[str, npt.NDArray[Any]]) -> Plan:
    try:
        source, destination = map(layout_from_bytes, blobs)
    except LayoutError as error:
        raise PlanError(f"a layout inside the plan is damaged: {error}") from error
    inputs = PlanInputs(
        source=source,
        destination=destination,
        casts=frozenset((DType(a), DType(b)) for a, b in fields["casts"]),
        topology=None if fields["topology"] is None else Topology.from_json(fields["topology"]),
        ignore=tuple(fields["ignore"]),
        ranks=None if fields["ranks"] is None else tuple(fields["ranks"]),
    )
    columns = {n: a.reshape(fields["num"], fields["max_ndim"]) if n in WIDE_COLUMNS else a for n, a in columns.items()}
    table = CopyTable(names=tuple(fields["names"]), storages=tuple(fields["storages"]), **columns)
    cert = fields["certificate"]
    certificate = Certificate(
        needed_bytes=dict(zip(cert["ranks"], cert["needed_bytes"], strict=True)),
        held_bytes=dict(zip(cert["ranks"], cert["held_bytes"], strict=True)),
        node_floor_bytes=dict(zip(cert["nodes"], cert["node_floor_bytes"], strict=True)),
    )
    plan = Plan(inputs, table, certificate)
    for what, stored, found in (
        ("inputs", fields["digest"], plan.digest),
        ("copies", fields["content_digest"], plan.content_digest),
    ):
        if stored != found:
            raise PlanError(f"the plan's {what} are damaged: digest {found[:12]}, the file says {stored[:12]}")
    return plan

"""Write a list of parts (SBOM, CycloneDX 1.6) for each wheel in a folder.

    python tools/sbom.py WHEELS FOLDER

A list names the wheel with its hash, and what it requires with the version that the tests passed with. Nothing is
vendored into a wheel, so there are no other parts. The same wheel gives the same list.
"""

# A decorator of cyclonedx makes the constructors, which pyright cannot follow.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import hashlib
import os
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from email.message import Message
from email.parser import Parser
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PINNED = re.compile(r"^([\w.-]+)==([\w.+]+)", re.MULTILINE)


def metadata_of(wheel: Path) -> Message:
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def parts(metadata: Message, tested: dict[str, str]) -> Iterator[Component]:
    """One component for each requirement; those of extras are optional."""
    ranges: dict[str, list[Requirement]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        ranges.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    for name, requirements in sorted(ranges.items()):
        needed = any("extra" not in str(one.marker or "") for one in requirements)
        properties = [Property(name="accel:range", value=str(one.specifier)) for one in requirements[:1]]
        properties += [Property(name="accel:tested-version", value=tested[name])] if name in tested else []
        yield Component(
            name=name,
            type=ComponentType.LIBRARY,
            scope=ComponentScope.REQUIRED if needed else ComponentScope.OPTIONAL,
            purl=PackageURL("pypi", name=name),
            bom_ref=name,
            properties=properties,
        )


def list_of(wheel: Path, tested: dict[str, str], built: datetime) -> str:
    """The list of a wheel, as JSON.

    Raises:
        ValueError: the list does not fit the schema of CycloneDX.
    """
    metadata = metadata_of(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    name, version = canonicalize_name(metadata["Name"]), metadata["Version"]
    component = Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        description=metadata["Summary"],
        licenses=[LicenseExpression(metadata["License-Expression"])],
        purl=PackageURL("pypi", name=name, version=version, qualifiers={"file_name": wheel.name}),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        bom_ref=f"{name}@{version}",
    )
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest))
    bom.metadata.timestamp = built
    bom.metadata.component = component
    required = list(parts(metadata, tested))
    bom.components.update(required)
    bom.register_dependency(component, required)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    if fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"{wheel.name}: {fault}")
    return text + "\n"


def main(arguments: list[str]) -> int:
    """Writes the lists, and returns the exit code."""
    wheels = sorted(Path(arguments[0]).glob("*.whl"))
    folder = Path(arguments[1])
    folder.mkdir(parents=True, exist_ok=True)
    pins = PINNED.findall((ROOT / "tools/constraints.txt").read_text(encoding="utf-8"))
    tested = {str(canonicalize_name(name)): version for name, version in pins}
    built = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc)
    for wheel in wheels:
        (folder / f"{wheel.stem}.cdx.json").write_text(list_of(wheel, tested, built), encoding="utf-8")
    print(f"sbom: wrote the parts of {len(wheels)} wheels to {folder}")
    return 0 if wheels else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Check custom resources, which kubernetes-validate does not know, by the schemas beside this: `check.py FILE...`.

The schemas are of the fields that these manifests use, and refuse all others. What is Kubernetes' own in a custom
resource, such as a pod's template, they leave to the definitions by which kubernetes-validate checks everything else.
"""

import json
import sys
from pathlib import Path

import jsonschema
import yaml
from kubernetes_validate.utils import latest_version, schema_contents
from referencing import Registry, Resource

FOLDER = Path(__file__).parent
BUILT_IN = ("v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1")


def main(paths: list[str]) -> int:
    wrong = checked = 0
    kubernetes = kubernetes_definitions()
    for path in paths:
        for resource in yaml.safe_load_all(Path(path).read_text()):
            if resource["apiVersion"] in BUILT_IN:
                continue
            schema = json.loads((FOLDER / f"{resource['kind']}.json").read_text())
            checked += 1
            for error in jsonschema.Draft202012Validator(schema, registry=kubernetes).iter_errors(resource):
                name = f"{resource['kind']} {resource['metadata']['name']}"
                print(f"{path}: {name}: {error.json_path}: {error.message}", file=sys.stderr)
                wrong += 1
    print(f"{checked} custom resources checked, {wrong} wrong")
    return 1 if wrong else 0


def kubernetes_definitions() -> Registry:
    """Return the definitions of `kubernetes-validate --strict`, which refuse unknown fields."""
    version = latest_version()
    contents = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/_definitions.json", version)
    return Resource.from_contents(contents) @ Registry()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Check custom resources, which kubernetes-validate does not know, by the schemas beside this: `check.py FILE...`.

The schemas are of the fields that these manifests use, and refuse all others.
"""

import json
import sys
from pathlib import Path

import jsonschema
import yaml

FOLDER = Path(__file__).parent
BUILT_IN = ("v1", "apps/v1", "autoscaling/v2", "networking.k8s.io/v1", "policy/v1")


def main(paths: list[str]) -> int:
    wrong = checked = 0
    for path in paths:
        for resource in yaml.safe_load_all(Path(path).read_text()):
            if resource["apiVersion"] in BUILT_IN:
                continue
            schema = json.loads((FOLDER / f"{resource['kind']}.json").read_text())
            checked += 1
            for error in jsonschema.Draft202012Validator(schema).iter_errors(resource):
                name = f"{resource['kind']} {resource['metadata']['name']}"
                print(f"{path}: {name}: {error.json_path}: {error.message}", file=sys.stderr)
                wrong += 1
    print(f"{checked} custom resources checked, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

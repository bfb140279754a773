"""Print what the client of servers needs: the kit's requirements and its notebooks', without torch and what stands on it.

python scripts/client_requirements.py > client.txt
pip install --constraint constraints.txt --requirement client.txt && pip install --no-deps .
"""

import re
import tomllib
from pathlib import Path

WITH_TORCH = {"accelerate", "datasets", "safetensors", "tokenizers", "torch", "transformers"}


def requirements() -> list[str]:
    """Return the lines of a requirements file."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["notebooks"]]
    return [line for line in lines if re.split(r"[^\w-]", line)[0] not in WITH_TORCH]


if __name__ == "__main__":
    print("\n".join(requirements()))

"""What holds for all tests: no hub, no display, and runs that stay out of the checkout's outputs."""

import os
import tempfile

# Set before anything is imported, and inherited by every process that a test starts.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "BENCHLIB_HEADLESS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "agg",
    }
)
_outputs = tempfile.TemporaryDirectory(prefix="benchlib-test-outputs-")  # removed when the interpreter ends
os.environ["BENCHLIB_OUTPUTS"] = _outputs.name

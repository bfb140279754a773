"""What people see: report, figures, widgets, index, exports."""

import sys

# nbformat's validator brings jsonschema, and that a grammar of IRIs if it is installed, for seconds; no notebook has IRIs.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

"""HTTP headers that restrict what browsers do with the dashboard's page."""

from __future__ import annotations

import base64
import hashlib
import re


def page_rules(page: str) -> dict[str, str]:
    """Return headers for `page`: only its own scripts run, they access only this server, and no page may frame it."""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{one}'" for one in digests) or "'none'",
        "style-src": "'unsafe-inline'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }

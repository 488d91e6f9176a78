"""Tells secrets from other texts: names of environment variables, and addresses with a password."""

import re

LOOKS_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|CONNECTION_STRING", re.IGNORECASE)
"""Matches names of environment variables that probably hold secrets."""
HAS_PASSWORD = re.compile(r"://[^/\s@]*:(?!\$)[^/\s@]*@")
"""Matches a URL with a plain password, such as https://me:word@example.org; a $VARIABLE there does not match."""

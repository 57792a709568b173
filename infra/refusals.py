"""What a failure of a database or store means to people: what, where, what to try. Never a password.

The functions look at an error that a driver raised and return a sentence, or None for one that may pass.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

_SECRET_PARTS = ("password", "sslpassword", "passfile")

_DATABASE = (
    (r"password authentication failed for user \"(.*?)\"", "refuses the password of {0}: set the right one in"),
    (r"no password supplied", "asks for a password: set it in"),
    (r"role \"(.*?)\" does not exist", "knows no user {0}: create it, or correct the name in"),
    (r"role \"(.*?)\" is not permitted to log in", "does not let {0} log in: give it LOGIN, or use another user in"),
    (r"database \"(.*?)\" does not exist", "has no database {0}: create it (createdb {0}), or correct the name in"),
    (r"permission denied for database", "does not let this user connect: grant it CONNECT, or use another user in"),
    (r"no pg_hba.conf entry for (host .*?),", "does not admit {0} (pg_hba.conf): admit it there, or correct"),
    (r"(must be owner of|permission denied for) (\w+ \S+)", "forbids it ({0} {1}): use the database's owner in"),
    (r"(unable to open database file|attempt to write a readonly database)", "does not open ({0}): look at"),
    (r"file is not a database", "is not a SQLite file: correct"),
)

_STORE = {
    "NoSuchBucket": "has no bucket {bucket}: create it with `sao bootstrap`, or correct SAO_OBJECT_STORE",
    "InvalidAccessKeyId": "does not know the access key: set the right AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "refuses the secret key: set the right AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "lets this key not do that: let it read, write, list and delete in {bucket}, or use another key",
    "403": "lets this key not do that: set the right AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "says that the session has expired: renew AWS_SESSION_TOKEN and its key",
    "RequestTimeTooSkewed": "says that this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": "is in another region: set AWS_DEFAULT_REGION",
    "PermanentRedirect": "is in another region: set AWS_DEFAULT_REGION",
    "InvalidBucketName": "takes no bucket of the name {bucket}: correct SAO_OBJECT_STORE",
    "NoCredentialsError": "asks for a key: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "PartialCredentialsError": "asks for a whole key: set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ParamValidationError": "takes no bucket of the name {bucket}: correct SAO_OBJECT_STORE",
}


def without_password(url: str) -> str:
    """A URL of a database or server as people may see it: the user stays, every password is gone."""
    try:
        parts = urlsplit(url)
        if parts.scheme.startswith("http"):
            return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        parsed = make_url(url)
    except (ValueError, ArgumentError):
        return url.rpartition("@")[2]
    parsed = parsed.difference_update_query([name for name in parsed.query if name in _SECRET_PARTS])
    return parsed.render_as_string(hide_password=True)


def of_database(error: BaseException, where: str) -> str | None:
    """Why the database at ``where`` will not serve us however long we wait; None if it may pass.

    A Postgres says it in words only (there is no SQLSTATE before a connection stands), in English unless it is set to
    another language.
    """
    said = " ".join(str(error).split())
    for pattern, sentence in _DATABASE:
        if found := re.search(pattern, said):
            passwords = " (or PGPASSWORD)" if "password" in pattern else ""
            return f"the ledger {where} {sentence.format(*found.groups())} SAO_DATABASE_URL{passwords}"
    return None


def of_store(error: BaseException, url: str, endpoint: str | None) -> str | None:
    """Why the store at ``url`` will not serve us however long we wait; None if it may pass."""
    sentence = _STORE.get(store_code(error) or "")
    if sentence is None and isinstance(error, PermissionError):
        sentence = f"may not be used as this user: {error}"
    bucket = url.removeprefix("s3://").partition("/")[0]
    return sentence and f"the object store {place(url, endpoint)} {sentence.format(bucket=bucket)}"


def place(url: str, endpoint: str | None) -> str:
    """A store's URL, and the server that is asked for it."""
    return f"{url} at {without_password(endpoint)}" if endpoint else url


def store_code(error: BaseException) -> str | None:
    """The code of S3's answer, or the kind of error that prevented a request; None for any other failure."""
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return str(response["Error"].get("Code"))
    return type(error).__name__ if type(error).__name__ in _STORE else None

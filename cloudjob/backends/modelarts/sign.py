"""Signs requests with an access key and its secret key, through the vendor's signer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

from huaweicloudsdkcore.sdk_request import SdkRequest
from huaweicloudsdkcore.signer.signer import Signer
from requests import PreparedRequest

from jobentry.contract.sigv4 import Keys

# The headers that are signed, besides those that the signer adds.
_SIGNED = ("Content-Type", "X-Project-Id")


def sign(request: PreparedRequest, keys: Keys, now: float) -> None:
    """Add the headers of a signature to ``request``.

    Args:
        now: Seconds since the epoch, by the service's clock.
    """
    parts = urlsplit(str(request.url))
    headers = {name: request.headers[name] for name in _SIGNED if name in request.headers}
    headers["X-Sdk-Date"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    if keys.token:
        headers["X-Security-Token"] = keys.token
    signed = SdkRequest(
        method=request.method,
        schema=parts.scheme,
        host=parts.netloc,
        resource_path=parts.path,
        query_params=parse_qsl(parts.query, keep_blank_values=True),
        header_params=headers,
        body=request.body or b"",
    )
    Signer(SimpleNamespace(ak=keys.access_key, sk=keys.secret_key)).sign(signed)
    request.headers.update(signed.header_params)
    # The query as it was signed: sorted, and with every special character quoted.
    request.url = f"{parts.scheme}://{parts.netloc}{signed.uri}"

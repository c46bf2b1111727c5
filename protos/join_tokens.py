"""Join tokens, each of which gets a machine the certificates of one site, once.

A token holds a short-lived certificate and its key, for the role of a joiner at one site, and the
authority that verifies the coordinator, so no other server learns the token. The operator has
sealed the certificates for this token, so the coordinator, which keeps them, can neither read nor
change them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import grpc

from isthmus.protos.control.v1.control_pb2 import JoinRequest
from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorStub
from isthmus.protos.error_statuses import error_for
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.identities import COORDINATOR, JOINER, Identity
from isthmus.protos.mutual_tls import identity_of
from isthmus.protos.proxies import proxy_options

_BEGIN: Final = "isthmus-join-"
_NONCE_BYTES: Final = 12
_WITHIN_S: Final = 20.0
TOKEN_CHARS: Final = 8192


class BadTokenError(IsthmusError):
    """A text is no join token, the token is for another site, or its answer cannot be opened."""

    code = "BAD_CERTIFICATE"


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A one-time certificate, its key, and the coordinator's authority, all in PEM."""

    ca: bytes
    cert: bytes
    key: bytes

    def text(self) -> str:
        """Return the token as one line of letters, digits, `-` and `_`."""
        fields = {"ca": self.ca, "cert": self.cert, "key": self.key}
        written = json.dumps({name: value.decode("ascii") for name, value in fields.items()})
        return _BEGIN + base64.urlsafe_b64encode(zlib.compress(written.encode(), 9)).decode("ascii")

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Read a token from its text.

        Raises:
            BadTokenError: the text is no token.
        """
        text = text.strip()
        if not text.startswith(_BEGIN) or len(text) > TOKEN_CHARS:
            raise BadTokenError(f"no join token: want a line that begins with {_BEGIN}")
        try:
            packed = base64.b64decode(text.removeprefix(_BEGIN), altchars=b"-_", validate=True)
            unpacking = zlib.decompressobj()
            fields = json.loads(unpacking.decompress(packed, TOKEN_CHARS))
            token = cls(*(fields[name].encode("ascii") for name in ("ca", "cert", "key")))
            token._secret()
            token.identity  # noqa: B018 - raises
        except (binascii.Error, zlib.error) as error:
            raise BadTokenError(f"no join token: {text_of(error)}") from error
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadTokenError(f"no join token: {text_of(error)}") from error
        return token

    @property
    def identity(self) -> Identity:
        """The joiner's identity in the token.

        Raises:
            BadTokenError: the certificate is not that of a joiner.
        """
        from cryptography import x509  # imported late: not needed without TLS

        found = identity_of(x509.load_pem_x509_certificate(self.cert))
        if found is None or found.role != JOINER:
            raise BadTokenError("its certificate is of no joiner")
        return found

    @property
    def holder(self) -> str:
        """The coordinator's name for the token."""
        return holder_of(self.cert)

    def seal(self, files: Mapping[str, bytes]) -> bytes:
        """Encrypt files, by name, so that only the token's holder can read them."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        written = json.dumps({name: content.decode("ascii") for name, content in files.items()})
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + AESGCM(self._secret()).encrypt(nonce, written.encode(), self._bound)

    def open(self, sealed: bytes) -> dict[str, bytes]:
        """Decrypt the sealed files.

        Raises:
            BadTokenError: the text was not sealed for this token, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            written = AESGCM(self._secret()).decrypt(nonce, rest, self._bound)
            return {str(name): text.encode("ascii") for name, text in json.loads(written).items()}
        except (InvalidTag, AttributeError, TypeError, ValueError) as error:
            raise BadTokenError(
                "what the coordinator has for this token cannot be opened"
            ) from error

    def exchange(self, address: str) -> dict[str, bytes]:
        """Exchange the token at the coordinator (host:port) for its files.

        Raises:
            IsthmusError: the token was used or has expired, or no trusted coordinator answers.
        """
        server = Identity(self.identity.domain, COORDINATOR).dns_name
        options = [("grpc.ssl_target_name_override", server), *proxy_options()]
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        with grpc.secure_channel(address, credentials, options=options) as channel:
            try:
                answer = CoordinatorStub(channel).Join(JoinRequest(), timeout=_WITHIN_S)
            except grpc.RpcError as error:
                raise error_for(error.code(), error.details() or error.code().name) from error
        return self.open(answer.sealed)

    @property
    def _bound(self) -> bytes:
        """The holder's identity, which the encryption authenticates."""
        return self.identity.uri.encode()

    def _secret(self) -> bytes:
        """Return a key of 32 bytes derived from the token's."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        key = serialization.load_pem_private_key(self.key, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise BadTokenError("want an elliptic curve's key")
        number = key.private_numbers().private_value.to_bytes(32, "big")
        return HKDF(SHA256(), 32, salt=None, info=b"isthmus join").derive(number)


def holder_of(cert: bytes) -> str:
    """Return the sha256 of a certificate in PEM, in hex.

    Raises:
        ValueError: the bytes are no certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    der = x509.load_pem_x509_certificate(cert).public_bytes(Encoding.DER)
    return hashlib.sha256(der).hexdigest()

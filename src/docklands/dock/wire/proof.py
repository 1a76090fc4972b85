"""How both ends of a near line prove their keys: the secret that two CurveZMQ key pairs share, and proofs made of it.

A key pair of CurveZMQ is one of Curve25519, so two ends that know each other's public key share a secret that nobody
else can make: X25519 (RFC 7748, by libsodium, as in CurveZMQ) of the own secret key and the other one's public key. A
proof is an HMAC-SHA256 (RFC 2104) under it of the side that speaks and of both sides' fresh numbers. Made once per pair
of keys, and kept.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from functools import lru_cache

from nacl.bindings import crypto_scalarmult
from nacl.exceptions import RuntimeError as NaClRuntimeError
from zmq.utils import z85

SERVER, CLIENT = b"server", b"client"
PROOF = hashlib.sha256().digest_size
"""Bytes of a proof, and of a fresh number."""


@lru_cache(maxsize=256)
def shared(secret_key: str, public_key: str) -> bytes:
    """What the holder of one secret key shares with that of the other one, 32 bytes. Keys are Z85 text.

    Raises ValueError for what is not a key, or one that shares the same with everybody.
    """
    try:
        secret, public = z85.decode(secret_key), z85.decode(public_key)
    except (KeyError, struct.error) as error:
        raise ValueError("not a key") from error
    if len(secret) != 32 or len(public) != 32:
        raise ValueError("not a key")
    try:
        return crypto_scalarmult(secret, public)
    except NaClRuntimeError as error:
        raise ValueError("a point of low order is no key") from error


def proof(secret: bytes, side: bytes, *facts: bytes) -> bytes:
    """That `side` knows the shared secret; of facts of a fixed size."""
    return hmac.digest(secret, b"docklands near line\0" + side + b"".join(facts), "sha256")


def holds(said: bytes, secret: bytes, side: bytes, *facts: bytes) -> bool:
    """The proof is the one."""
    return hmac.compare_digest(said, proof(secret, side, *facts))

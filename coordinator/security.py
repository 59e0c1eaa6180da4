"""The coordinator's security settings: who may call it, and how it calls the model services."""

from dataclasses import replace

from coordinator.config import CoordinatorSettings
from paceline.process.service import server_options
from paceline.security.access import Check, bearer_tokens, nothing_described
from paceline.security.certificates import watch_certificates
from paceline.security.channels import ChannelSecurity
from paceline.wire import ServerOptions

CLIENTS_CONNECTION_AGE_S = 600.0
"""Seconds until a client has to connect anew, so that a coordinator that joined gets calls of older clients too. Model
services have no such limit: coordinators resolve their names themselves, and keep streams open."""


def clients_options(settings: CoordinatorSettings) -> ServerOptions:
    """Return how clients reach the coordinator. Raise StartupError when a file is wrong."""
    checks: list[Check] = []
    if settings.token_file:
        checks.append(bearer_tokens(settings.token_file))
    if not settings.describe:
        checks.append(nothing_described)
    return replace(
        server_options(settings, *checks),
        shares_port=settings.process_index is not None,
        max_connection_age_s=CLIENTS_CONNECTION_AGE_S,
    )


def models_security(settings: CoordinatorSettings) -> ChannelSecurity:
    """Return how the coordinator reaches the model services. Raise StartupError when a file is wrong.

    It shows them the certificate that it serves with.
    """
    if settings.models_ca is None:
        return ChannelSecurity(plaintext=settings.plaintext)
    certificates = watch_certificates(
        "--models-ca, --tls-certificate and --tls-key", settings.tls_certificate, settings.tls_key, settings.models_ca
    )
    return ChannelSecurity(certificates)

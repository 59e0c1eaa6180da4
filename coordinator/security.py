"""What the coordinator's settings say of who may call it, and of how it calls the model services."""

from dataclasses import replace

from coordinator.config import CoordinatorSettings
from paceline.process.service import server_options
from paceline.security.access import Check, bearer_tokens, nothing_described
from paceline.security.certificates import watch_certificates
from paceline.security.channels import ChannelSecurity
from paceline.wire import ServerOptions

CLIENTS_CONNECTION_AGE_S = 600.0
"""So long a coordinator that joined may get no calls of clients that were there before. Model services have no such
limit: coordinators look their names up themselves, and keep streams open."""


def clients_options(settings: CoordinatorSettings) -> ServerOptions:
    """How clients reach it. Raises StartupError where a file is wrong."""
    checks: list[Check] = []
    if settings.token_file:
        checks.append(bearer_tokens(settings.token_file))
    if not settings.describe:
        checks.append(nothing_described)
    return replace(server_options(settings, *checks), max_connection_age_s=CLIENTS_CONNECTION_AGE_S)


def models_security(settings: CoordinatorSettings) -> ChannelSecurity:
    """How it reaches the model services: it shows them the certificate that it serves with. Raises StartupError."""
    if settings.models_ca is None:
        return ChannelSecurity(plaintext=settings.plaintext)
    certificates = watch_certificates(
        "--models-ca, --tls-certificate and --tls-key", settings.tls_certificate, settings.tls_key, settings.models_ca
    )
    return ChannelSecurity(certificates)

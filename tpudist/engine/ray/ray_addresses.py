"""Addresses of Ray's services: whether they belong to this machine, and whether they answer."""

import socket


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        ValueError: If `address` does not have this form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{address!r} is not a host and a port. Use cluster addresses such as "
            f"'10.0.0.1:6379', with a port from 1 to 65535."
        )
    return host.strip("[]"), int(port)


def find_local_ip(host: str) -> str | None:
    """Returns the IP address of this machine that a name stands for.

    None if the name belongs to another machine, such as a load balancer.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None
    for *_, address in found:
        ip = str(address[0])
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:  # only an address of this machine can be bound
                probe.bind((ip, 0))
            except OSError:
                continue
            return ip
    return None


def is_answered(host: str, port: int, timeout_s: float = 3.0) -> bool | None:
    """Returns whether a service accepts connections; None if that is unknown.

    False is certain: the host exists, and refuses the connection.
    """
    try:
        with socket.create_connection((host, port), timeout_s):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None

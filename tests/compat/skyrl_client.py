"""The client with SkyRL's names for servers of `tests.rpc.servers`, and what they were sent."""

from torchrl_ext.compat.skyrl import RemoteInferenceClient


def made(*servers, **settings):
    """A client with SkyRL's names for these servers, of which the first is the router, too."""
    urls = [server.url for server in servers]
    proxy = urls[0].replace("127.0.0.1", "localhost")
    return RemoteInferenceClient(proxy_url=proxy, server_urls=urls, timeout_s=20, **settings)


def sent(server, route):
    """Queries and bodies of the calls of a route."""
    return [(call.query, call.body) for call in server.calls if call.route == f"POST /{route}"]


def routes(server, method=""):
    """Routes of its calls, in order."""
    return [call.route for call in server.calls if call.route.startswith(method)]

"""What the supervisor decides for each part, because it says where the parts find each other."""

from tokenloom.services.runtime.host.options import options_of, variable
from tokenloom.services.runtime.host.service_settings import ServiceSettings

COMMON = ("log_level", "log_format", "otlp_endpoint", "bill", "insecure")
"""Options that every service has, and that mean the same for all of them."""
DEALT = ("plugins",)
"""Options that every service has, and of whose values each gets those that are for it."""
DECIDED = frozenset(
    {
        *("config", "instance_id", "listen", "listen_fd", "http_listen", "http_listen_fd", "state_file", "model"),
        *("served_model_name", "coordinator", "tokenizers", "output_processors", "role", "kv_listen"),
        *("engines_on_host", "place_on_host", "data_parallel_size", "data_parallel_rank", "data_parallel_group"),
        *("data_parallel_address", "tower_threads", "advertise_address", "kv_advertise_address", "drain_timeout"),
        *("page_kills", "warm_up_dir"),
        *("grpc_listen", "grpc_listen_fd", "grpc_gateways", "https_listen", "https_listen_fd", "http_gateways"),
    }
)
"""Options of services that `tokenloom serve` does not offer."""
WITHHELD = frozenset(map(variable, DECIDED | (options_of(ServiceSettings).keys() - set(COMMON))))
"""The variables of these options, and of those that each part has for itself: one value for all parts would be wrong,
as one address or one certificate is."""

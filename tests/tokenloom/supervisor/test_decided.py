"""Each option of a service is offered by ``tokenloom serve``, or its variable does not reach the parts."""

from tokenloom.cli.serve.serve_options import OFFERS, SETTINGS
from tokenloom.services.runtime.host.options import options_of, variable
from tokenloom.supervisor.decided import DEALT, DECIDED, WITHHELD


def test_no_variable_of_a_service_passes_the_command() -> None:
    for service, settings in SETTINGS.items():
        for name, option in options_of(settings).items():
            if name not in OFFERS or service not in OFFERS[name].services:
                assert set(map(variable, option.names)) <= WITHHELD, f"{service}: {name}"


def test_what_is_offered_may_be_set_by_its_variable() -> None:
    offered = {offer.option.variable for offer in OFFERS.values() if offer.services}
    # The command reads these itself, and gives each part those that are for it.
    assert offered & WITHHELD == set(map(variable, DEALT))
    known = {name for settings in SETTINGS.values() for name in options_of(settings)}
    assert known >= DECIDED, "each is an option"


def test_only_the_supervisor_leads_a_page_to_itself() -> None:
    assert "page_kills" not in OFFERS
    assert "TOKENLOOM_PAGE_KILLS" in WITHHELD, "a user's variable would stop or open other meshes"

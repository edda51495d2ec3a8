from tests.soak.schemas import check_schemas


def test_what_the_demo_model_writes_obeys_random_schemas() -> None:
    check_schemas(range(30))

"""The stream to one gateway: credit, and the frames that go out."""

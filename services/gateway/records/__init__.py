"""What a client asks for, independent of the API that it uses."""

"""What every gRPC door shares: messages, statuses, generated code. Knows no protocol."""

//! The `cogni-gateway` command.

fn main() {}

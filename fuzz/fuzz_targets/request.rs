//! Any JSON of a client, in each protocol, leads to a body for the upstream that is JSON, has no forbidden field, differs
//! only in the gateway's own fields, and would be admitted again unchanged.
#![cfg_attr(fuzzing, no_main)]

#[path = "../../tests/llm/request/body_invariants.rs"]
mod sound;

use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway_fuzz::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let [route, size, body @ ..] = data else { return };
    // The first six routes take a body.
    let route = GatewayRoute::ALL[usize::from(*route) % 6];
    sound::check_body(route, usize::from(*size), body);
});

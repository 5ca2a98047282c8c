//! Whatever JSON a client sends, on each protocol: what goes up is JSON, has no field that may not be
//! there, differs in nothing but what is ours, and would be admitted again as it is.
#![cfg_attr(fuzzing, no_main)]

#[path = "../../tests/llm/request/body_invariants.rs"]
mod sound;

use cogni_gateway::llm::protocol::GatewayRoute;
use cogni_gateway_fuzz::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let [route, size, body @ ..] = data else { return };
    // The first six take a body.
    let route = GatewayRoute::ALL[usize::from(*route) % 6];
    sound::check(route, usize::from(*size), body);
});

//! Whatever bytes come on a run's socket, in whatever pieces: with the lane and without, the upstream gets the same
//! requests, the client the same answers, and the same is written down.
#![cfg_attr(fuzzing, no_main)]

#[path = "../../tests/gateway/lane/oracle.rs"]
mod oracle;

use bytes::Bytes;
use cogni_gateway::gateway::pipeline::server::lane::head;
use cogni_gateway_fuzz::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let [cut, request @ ..] = data else { return };
    // What the lane does not take is handed over as it came: both ways are one.
    let mut received = Bytes::copy_from_slice(request);
    if head::parse_head(&mut received, 100, 32 << 20).is_none() {
        return;
    }
    let (first, second) = request.split_at(usize::from(*cut) * 4 % (request.len() + 1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    runtime.block_on(oracle::check(&[first, second]));
});

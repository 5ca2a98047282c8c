//! Any bytes on a run's socket, in any pieces, have one effect with the lane and without: the upstream gets the same requests, the
//! client gets the same answers, and the same records are written.
#![cfg_attr(fuzzing, no_main)]

#[path = "../../tests/gateway/lane/oracle.rs"]
mod oracle;

use bytes::Bytes;
use cogni_gateway::gateway::pipeline::server::lane::head;
use cogni_gateway_fuzz::fuzz_target;
use oracle::ConversationEnd::{EndOfWriting, LastRequest};

fuzz_target!(|data: &[u8]| {
    let [cut, request @ ..] = data else { return };
    // The lane hands other requests to hyper unchanged, so both servers are the same for them.
    let mut received = Bytes::copy_from_slice(request);
    let Some(head) = head::parse_head(&mut received, 100, 32 << 20) else { return };
    // A client that leaves behind a whole request may leave before or after the request is sent to the upstream.
    let is_whole = received.len() as u64 >= head.length;
    let end = if is_whole || cut % 2 == 0 { LastRequest } else { EndOfWriting };
    let (first, second) = request.split_at(usize::from(*cut) * 4 % (request.len() + 1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    runtime.block_on(oracle::compare_servers(&[first, second], end));
});

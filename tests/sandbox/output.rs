//! R5: Captured output is bounded, and reports what is missing.

use cogni_gateway::sandbox::output::{CapturedOutput, HeadTailBuffer, OutputCapture, OutputStream};
use proptest::prelude::*;

proptest! {
    /// R5: The beginning and the end are kept and the count is right, however the stream is split into chunks.
    #[test]
    fn captured_output_does_not_depend_on_the_chunks(
        printed in proptest::collection::vec(any::<u8>(), 0..300),
        cuts in proptest::collection::vec(0usize..300, 0..8),
        limit in 0usize..200,
    ) {
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(printed.len())).collect();
        cuts.sort_unstable();
        let mut capture = HeadTailBuffer::new(limit);
        let mut from = 0;
        for to in cuts.into_iter().chain([printed.len()]) {
            capture.push(&printed[from..to]);
            from = to;
        }
        let kept = capture.finish();
        prop_assert_eq!(&kept, &capture_output(&printed, limit));
        prop_assert_eq!(kept.truncated, printed.len() > limit);
    }
}

/// Captures a stream that is available as a whole.
fn capture_output(printed: &[u8], limit: usize) -> CapturedOutput {
    let bytes = printed.len() as u64;
    let Some(left_out) = printed.len().checked_sub(limit).filter(|left_out| *left_out > 0) else {
        let text = String::from_utf8_lossy(printed).into_owned();
        return CapturedOutput { text, bytes, truncated: false };
    };
    let (head, tail) = (&printed[..limit / 2], &printed[limit / 2 + left_out..]);
    let line = format!("\n[{left_out} bytes left out]\n");
    let text = String::from_utf8_lossy(&[head, line.as_bytes(), tail].concat()).into_owned();
    CapturedOutput { text, bytes, truncated: true }
}

/// R5: A listener that goes away loses no output for the result.
#[tokio::test]
async fn a_listener_that_leaves_costs_no_output() {
    let (listener, reader) = tokio::io::duplex(64);
    drop(listener);
    let mut output = OutputCapture::new(100, reader);
    output.push(OutputStream::Stdout, b"one ").await;
    output.push(OutputStream::Stderr, b"aside").await;
    output.push(OutputStream::Stdout, b"two").await;
    assert_eq!(output.stdout.finish().text, "one two");
    assert_eq!(output.stderr.finish().text, "aside");
}

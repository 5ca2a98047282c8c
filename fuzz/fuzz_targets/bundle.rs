//! Any bundle header is read to the byte, or refused.
#![cfg_attr(fuzzing, no_main)]

use cogni_gateway::relay::repo::bundle::BundleHeader;
use cogni_gateway::relay::repo::extract_commands::AnnouncedBranch;

cogni_gateway_fuzz::fuzz_target!(|data: &[u8]| {
    let wanted = "refs/heads/sandbox/k";
    if let Ok(header) = BundleHeader::parse(data, wanted) {
        let at = usize::try_from(header.pack_at).expect("it is in memory");
        let head = &data[..at];
        assert!(head.ends_with(b"\n\n"));
        // Bytes after the header do not change it, and a header without its end is refused.
        assert_eq!(BundleHeader::parse(head, wanted), Ok(header.clone()));
        assert!(BundleHeader::parse(&head[..at - 1], wanted).is_err());
        let line = format!("{} {wanted}\n", header.tip);
        assert!(head.windows(line.len()).any(|window| window == line.as_bytes()));
    }
    if let Ok(Some(announced)) = AnnouncedBranch::parse(data, 0) {
        assert!(announced.commits > 0 && announced.merges <= announced.commits);
    }
});

//! Any text as a token is valid if and only if the gateway has signed it, in this spelling.
#![cfg_attr(fuzzing, no_main)]

use std::time::{Duration, UNIX_EPOCH};

use cogni_gateway::gateway::run::token::{MAX_TOKEN_BYTES, RunTokenClaims, RunTokenKeys};
use cogni_gateway_fuzz::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(keys) = RunTokenKeys::parse_keys(text) {
        let token =
            keys.mint_token("run-1", Duration::from_secs(1), None, UNIX_EPOCH).expect("a token");
        assert!(token.len() <= MAX_TOKEN_BYTES);
        assert!(keys.verify_token(&token, UNIX_EPOCH).is_ok());
    }
    let keys = RunTokenKeys::parse_keys(KEYS).expect("two keys");
    if let Ok(claims) = keys.verify_signature(text) {
        let (key_id, peeked) =
            RunTokenClaims::decode_unverified(text).expect("what is signed can be read");
        assert_eq!(peeked, claims);
        assert_eq!(
            keys.sign_claims(&claims, Some(key_id)).as_deref(),
            Ok(text),
            "another spelling"
        );
    }
});

/// The seeds are signed with these keys.
const KEYS: &str = "a = 1111111111111111111111111111111111111111111111111111111111111111\n\
                    b = 2222222222222222222222222222222222222222222222222222222222222222";

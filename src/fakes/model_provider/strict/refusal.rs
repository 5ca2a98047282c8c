//! The refusal of a request as the providers write it.

use http::StatusCode;
use serde_json::{Value, json};

/// A refusal with the provider's status and body.
#[derive(Debug)]
pub(in crate::fakes::model_provider) struct ProviderRefusal {
    pub(in crate::fakes::model_provider) status: StatusCode,
    pub(in crate::fakes::model_provider) body: Value,
}

impl ProviderRefusal {
    /// Makes a refusal of OpenAI's kind `invalid_request_error`.
    pub(super) fn openai(
        status: StatusCode,
        message: &str,
        param: Option<&str>,
        code: Option<&str>,
    ) -> Self {
        let error = json!({
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": code,
        });
        Self { status, body: json!({ "error": error }) }
    }

    /// Makes a refusal of Anthropic's.
    pub(super) fn anthropic(status: StatusCode, kind: &str, message: &str) -> Self {
        let error = json!({ "type": kind, "message": message });
        let body = json!({ "type": "error", "error": error, "request_id": "req_fake" });
        Self { status, body }
    }
}

//! The query of a request over a connection: parameters that carry a credential of the client.

use percent_encoding::percent_decode_str;

/// Returns the name of the first parameter that carries a credential. Such a request cannot lose its credential without
/// a change of its meaning, so it is refused.
pub(super) fn find_credential_parameter(query: &str) -> Option<&'static str> {
    query.split(['&', ';']).find_map(|parameter| {
        let name = parameter.split('=').next().unwrap_or_default().replace('+', " ");
        let name = percent_decode_str(&name).decode_utf8_lossy().trim().to_ascii_lowercase();
        // Some servers read `token[]=` as `token=`.
        let name = name.split('[').next().unwrap_or_default();
        CREDENTIAL_PARAMETERS.into_iter().find(|known| *known == name)
    })
}

/// Returns true if a parameter has the beginning of those with which AWS presigns addresses. S3 reads headers from such
/// parameters, too.
pub(super) fn has_aws_parameter(query: &str) -> bool {
    query.split(['&', ';']).any(|parameter| {
        let name: Vec<u8> = percent_decode_str(parameter).collect();
        name.trim_ascii_start().to_ascii_lowercase().starts_with(b"x-amz-")
    })
}

/// Names of parameters that carry a credential at well-known services, in small letters.
const CREDENTIAL_PARAMETERS: [&str; 27] = [
    "access_token",
    "api-key",
    "api_key",
    "apikey",
    "app_key",
    "application_key",
    "auth_token",
    "authorization",
    "awsaccesskeyid",
    "circle-token",
    "client_secret",
    "feed_token",
    "id_token",
    "job_token",
    "oauth_token",
    "password",
    "private_token",
    "refresh_token",
    "sig",
    "signature",
    "subscription-key",
    "token",
    "x-amz-credential",
    "x-amz-security-token",
    "x-amz-signature",
    "x-goog-credential",
    "x-goog-signature",
];

//! Calls to GitHub's REST API, and what its answers mean.
//!
//! Each call is one request over HTTP/1.1 ([`transport`]): no redirect is followed, nothing is sent a second time, and no
//! answer is read without an end.

mod error;
mod retry;
mod transport;

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::{HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base;
use crate::base::secret::SecretString;
use crate::relay::git::OutboundConfig;
use crate::relay::repo::repository::HostedRepository;
use transport::GithubTransport;

pub use error::{GithubError, ValidationProblem};
pub use retry::RetryPolicy;

/// Where the API is, and how long it may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GithubConfig {
    /// `https://api.github.com`, or `https://HOST/api/v3` of GitHub Enterprise.
    pub url: Uri,
    pub network: OutboundConfig,
    /// For a connection.
    pub connect_timeout: Duration,
    /// For a call, its answer included.
    pub timeout: Duration,
    pub patience: RetryPolicy,
}

/// A client of one forge's API.
#[derive(Clone)]
pub struct GithubClient {
    way: GithubTransport,
    config: GithubConfig,
}

/// What a repository says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RepositoryInfo {
    pub default_branch: String,
    #[serde(default)]
    pub archived: bool,
}

/// What a branch says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct BranchInfo {
    pub protected: bool,
}

/// What a query is answered with; what it found is left out.
#[derive(Deserialize)]
struct GraphqlResponse {
    #[serde(default)]
    errors: Vec<GraphqlError>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct GraphqlError {
    #[serde(rename = "type")]
    kind: String,
    message: String,
}

impl Default for GithubConfig {
    fn default() -> Self {
        Self {
            url: Uri::from_static("https://api.github.com"),
            network: OutboundConfig::default(),
            connect_timeout: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            patience: RetryPolicy::default(),
        }
    }
}

impl GithubClient {
    /// # Errors
    /// The authorities cannot be read.
    pub fn new(config: GithubConfig) -> io::Result<Self> {
        Ok(Self { way: GithubTransport::new(&config)?, config })
    }

    pub fn retry_policy(&self) -> &RetryPolicy {
        &self.config.patience
    }

    /// Whether this API is the one of the repository's host, so that a token for one may be shown to the other.
    ///
    /// `https://api.github.com` is that of `github.com`; an Enterprise's own is on its host.
    pub fn serves_repository(&self, repository: &HostedRepository) -> bool {
        let Some(api) = self.config.url.authority() else { return false };
        let (api, host) = (api.as_str().to_ascii_lowercase(), repository.authority());
        api.strip_prefix("api.").unwrap_or(&api) == host.to_ascii_lowercase()
            || api == host.to_ascii_lowercase()
    }

    /// # Errors
    /// As every call.
    pub async fn repository_info(
        &self,
        token: &SecretString,
        repository: &HostedRepository,
    ) -> Result<RepositoryInfo, GithubError> {
        self.get(token, &repository_path(repository, "")).await
    }

    /// What is known of a branch; `None` where there is none of that name.
    ///
    /// # Errors
    /// As every call.
    pub async fn branch_info(
        &self,
        token: &SecretString,
        repository: &HostedRepository,
        branch: &str,
    ) -> Result<Option<BranchInfo>, GithubError> {
        match self
            .get(
                token,
                &repository_path(repository, &format!("/branches/{}", percent_encode(branch))),
            )
            .await
        {
            Ok(branch) => Ok(Some(branch)),
            Err(GithubError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        path: &str,
    ) -> Result<T, GithubError> {
        self.call_once(token, Method::GET, path, None::<&()>).await
    }

    /// One mutation of the API that is not REST, for what REST cannot do. What it answers is not needed.
    pub(super) async fn graphql_mutation(
        &self,
        token: &SecretString,
        query: &str,
        id: &str,
    ) -> Result<(), GithubError> {
        let body = serde_json::json!({ "query": query, "variables": { "id": id } });
        let called =
            Box::pin(self.send_and_parse(token, (Method::POST, GRAPHQL_PATH), Some(&body)));
        let answer: GraphqlResponse = self.with_timeout(called).await?;
        match answer.errors.first() {
            Some(error) => Err(GithubError::from_graphql(&error.kind, &error.message)),
            None => Ok(()),
        }
    }

    /// One call, once: whoever may repeat it knows whether it may have been done already.
    pub(super) async fn call_once<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, GithubError> {
        self.with_timeout(Box::pin(self.send_and_parse(token, (method, path), body))).await
    }

    async fn with_timeout<T>(
        &self,
        called: impl Future<Output = Result<T, GithubError>>,
    ) -> Result<T, GithubError> {
        match tokio::time::timeout(self.config.timeout, called).await {
            Ok(answered) => answered,
            Err(_elapsed) => {
                Err(GithubError::Unanswered(format!("nothing within {:?}", self.config.timeout)))
            }
        }
    }

    async fn send_and_parse<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        (method, path): (Method, &str),
        body: Option<&impl Serialize>,
    ) -> Result<T, GithubError> {
        let request = self.build_request(token, (method, path), body)?;
        let response = self.way.send(request).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
        let body = body
            .map_err(|error| GithubError::Unanswered(broken_response_message(&*error)))?
            .to_bytes();
        if !head.status.is_success() {
            return Err(GithubError::from_response(&head, &body));
        }
        // The work is done; an answer that cannot be read is as good as one that was lost.
        serde_json::from_slice(&body).map_err(|error| {
            GithubError::Unanswered(format!("its answer is not what its API describes ({error})"))
        })
    }

    /// Builds a request to the API's own address, which is the only one that a token is shown to.
    fn build_request(
        &self,
        token: &SecretString,
        (method, path): (Method, &str),
        body: Option<&impl Serialize>,
    ) -> Result<Request<Full<Bytes>>, GithubError> {
        let mut token = HeaderValue::try_from(format!("Bearer {}", token.expose_secret()))
            .map_err(|_| {
                GithubError::Unauthorized("no header may have its characters".to_owned())
            })?;
        token.set_sensitive(true);
        let request = Request::builder()
            .method(method)
            .uri(self.absolute_uri(path).map_err(invalid_request_error)?)
            .header(USER_AGENT, USER_AGENT_VALUE)
            .header(ACCEPT, "application/vnd.github+json")
            .header("x-github-api-version", API_VERSION)
            .header(AUTHORIZATION, token);
        let request = match body {
            None => request.body(Full::default()),
            Some(body) => {
                let body = serde_json::to_vec(body).map_err(invalid_request_error)?;
                request.header(CONTENT_TYPE, "application/json").body(body.into())
            }
        };
        request.map_err(invalid_request_error)
    }

    /// Joins the API's address and a path. An Enterprise has the other API beside the REST API, not in it.
    fn absolute_uri(&self, path: &str) -> Result<Uri, http::Error> {
        let url = &self.config.url;
        let base = url.path().trim_end_matches('/');
        let beside = base.strip_suffix("/v3").filter(|_| path == GRAPHQL_PATH);
        let mut parts = url.clone().into_parts();
        parts.path_and_query = Some(format!("{}{path}", beside.unwrap_or(base)).parse()?);
        Ok(Uri::from_parts(parts)?)
    }
}

impl fmt::Debug for GithubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The API's address.
impl fmt::Display for GithubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.config.url)
    }
}

/// Below a repository. Its parts are made of what a URL may have as it is.
pub(super) fn repository_path(repository: &HostedRepository, rest: &str) -> String {
    format!("/repos/{}/{}{rest}", repository.owner(), repository.name())
}

/// Text as a part of a URL: a branch's name in a path, a value in a query.
pub(super) fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let mut digits = [0; 2];
            base::hex::encode_hex(&[byte], &mut digits);
            encoded.push('%');
            encoded.extend(digits.map(|digit| char::from(digit.to_ascii_uppercase())));
        }
    }
    encoded
}

/// Tells why an answer that has begun did not end.
fn broken_response_message(error: &(dyn std::error::Error + Send + Sync + 'static)) -> String {
    if error.is::<LengthLimitError>() {
        return format!("its answer is longer than {} MiB", MAX_RESPONSE_BYTES >> 20);
    }
    format!("its answer broke off ({})", transport::root_cause(error))
}

/// Tells why a request could not be made, which takes a repository's name that no URL can have.
fn invalid_request_error(error: impl fmt::Display) -> GithubError {
    GithubError::Unanswered(format!(
        "it cannot be asked for this ({error}); check the repository's URL"
    ))
}

/// The API that is not REST.
const GRAPHQL_PATH: &str = "/graphql";

/// The version of the REST API that the calls are written for.
const API_VERSION: &str = "2022-11-28";

/// GitHub wants to know who calls.
const USER_AGENT_VALUE: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// A page of pull requests has some hundred KiB, most of it addresses.
const MAX_RESPONSE_BYTES: usize = 4 << 20;

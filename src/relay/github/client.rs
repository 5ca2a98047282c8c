//! A client for GitHub's REST API, with one GraphQL mutation.
//!
//! Each call is one request over HTTP/1.1 ([`transport`]). The client follows no redirect, sends no request a second
//! time, and reads no answer beyond a limit.

mod error;
mod retry;
mod transport;

use std::fmt;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, LINK, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::secret::SecretString;
use crate::base::url_component::encode_url_component;
use crate::relay::git::OutboundConfig;
use crate::relay::repo::repository::HostedRepository;
use transport::GithubTransport;

pub use error::{GithubError, ValidationProblem};
pub use retry::RetryPolicy;

/// The address of the API and the limits of its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GithubConfig {
    /// `https://api.github.com`, or `https://HOST/api/v3` of GitHub Enterprise.
    pub url: Uri,
    pub network: OutboundConfig,
    /// The time limit of a connection attempt.
    pub connect_timeout: Duration,
    /// The time limit of a call, its answer included.
    pub timeout: Duration,
    pub retry: RetryPolicy,
}

/// A client of one forge's API.
#[derive(Clone)]
pub struct GithubClient {
    transport: GithubTransport,
    config: GithubConfig,
}

/// The fields of a repository that the relay reads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct RepositoryInfo {
    pub default_branch: String,
    #[serde(default)]
    pub archived: bool,
}

/// The fields of a branch that the relay reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct BranchInfo {
    pub protected: bool,
}

/// The answer to a GraphQL call. The relay needs no data of it, so only the errors are read.
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
            retry: RetryPolicy::default(),
        }
    }
}

impl GithubClient {
    /// Creates a client, and loads the certificate authorities.
    ///
    /// # Errors
    /// Returns an error if the certificate authorities cannot be read.
    pub fn new(config: GithubConfig) -> io::Result<Self> {
        Ok(Self { transport: GithubTransport::new(&config)?, config })
    }

    pub fn retry_policy(&self) -> &RetryPolicy {
        &self.config.retry
    }

    /// Returns true if this API is the one of the repository's host, so that a token for one may be sent to the other.
    ///
    /// The API of `github.com` is `https://api.github.com`. The API of a GitHub Enterprise server is on its own host.
    pub fn serves_repository(&self, repository: &HostedRepository) -> bool {
        let Some(api) = self.config.url.authority() else { return false };
        let (api, host) = (api.as_str().to_ascii_lowercase(), repository.authority());
        // The comparison includes the port: another port may belong to another server.
        api.strip_prefix("api.").unwrap_or(&api) == host.to_ascii_lowercase()
            || api == host.to_ascii_lowercase()
    }

    /// Returns the repository's data.
    ///
    /// # Errors
    /// Returns a [`GithubError`] if the call fails.
    pub async fn repository_info(
        &self,
        token: &SecretString,
        repository: &HostedRepository,
    ) -> Result<RepositoryInfo, GithubError> {
        self.get(token, &repository_path(repository, "")).await
    }

    /// Returns a branch's data, or `None` if there is no branch of that name.
    ///
    /// # Errors
    /// Returns a [`GithubError`] if the call fails, and [`GithubError::NotFound`] if there is no such repository or the
    /// token has no access to it.
    pub async fn branch_info(
        &self,
        token: &SecretString,
        repository: &HostedRepository,
        branch: &str,
    ) -> Result<Option<BranchInfo>, GithubError> {
        match self
            .get(
                token,
                &repository_path(
                    repository,
                    &format!("/branches/{}", encode_url_component(branch)),
                ),
            )
            .await
        {
            Ok(branch) => Ok(Some(branch)),
            // A missing branch and a missing repository have the same status here. Only the repository's own address
            // tells them apart.
            Err(GithubError::NotFound) => {
                self.repository_info(token, repository).await.map(|_| None)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends a GET request, and parses its answer.
    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        path: &str,
    ) -> Result<T, GithubError> {
        self.call_once(token, Method::GET, path, None::<&()>).await
    }

    /// Sends a GET request for one page of a list. Also returns true if the answer names a next page.
    pub(super) async fn get_page<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        path: &str,
    ) -> Result<(T, bool), GithubError> {
        let called = Box::pin(self.send_and_parse(token, (Method::GET, path), None::<&()>));
        let (page, headers) = self.with_timeout(called).await?;
        // The address itself is not needed, and would be another's choice of where the token goes.
        let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
        let has_next = links.flat_map(|links| links.split([',', ';'])).any(is_next_relation);
        Ok((page, has_next))
    }

    /// Calls one GraphQL mutation, for actions that the REST API does not have. The answer's data is ignored.
    pub(super) async fn graphql_mutation(
        &self,
        token: &SecretString,
        query: &str,
        id: &str,
    ) -> Result<(), GithubError> {
        let body = serde_json::json!({ "query": query, "variables": { "id": id } });
        let called =
            Box::pin(self.send_and_parse(token, (Method::POST, GRAPHQL_PATH), Some(&body)));
        // GraphQL reports errors with status 200, in the body.
        let (answer, _): (GraphqlResponse, _) = self.with_timeout(called).await?;
        match answer.errors.first() {
            Some(error) => Err(GithubError::from_graphql(&error.kind, &error.message)),
            None => Ok(()),
        }
    }

    /// Sends one request once. Only the caller knows whether a repetition is safe, because the first request may have
    /// been carried out.
    pub(super) async fn call_once<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, GithubError> {
        let called = Box::pin(self.send_and_parse(token, (method, path), body));
        Ok(self.with_timeout(called).await?.0)
    }

    /// Limits the time of a call. A call that takes longer may still be carried out.
    async fn with_timeout<T>(
        &self,
        called: impl Future<Output = Result<T, GithubError>>,
    ) -> Result<T, GithubError> {
        match tokio::time::timeout(self.config.timeout, called).await {
            Ok(answered) => answered,
            // A timeout cancels the request on this side only, so its effect is unknown.
            Err(_elapsed) => {
                Err(GithubError::NoResponse(format!("nothing within {:?}", self.config.timeout)))
            }
        }
    }

    /// Sends a request, reads the answer up to a limit, and parses it. Also returns the answer's headers.
    async fn send_and_parse<T: DeserializeOwned>(
        &self,
        token: &SecretString,
        (method, path): (Method, &str),
        body: Option<&impl Serialize>,
    ) -> Result<(T, HeaderMap), GithubError> {
        let request = self.build_request(token, (method, path), body)?;
        let response = self.transport.send(request).await?;
        let (head, body) = response.into_parts();
        // The limit protects this process's memory from an endless answer.
        let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
        let body = body
            .map_err(|error| GithubError::NoResponse(broken_response_message(&*error)))?
            .to_bytes();
        // A redirect is no success either. It is an error, because it would carry the token to another address.
        if !head.status.is_success() {
            return Err(GithubError::from_response(&head, &body));
        }
        // GitHub has done the work, but an answer that cannot be parsed tells as little as a lost one.
        let parsed = serde_json::from_slice(&body).map_err(|error| {
            GithubError::NoResponse(format!("its answer is not what its API describes ({error})"))
        })?;
        Ok((parsed, head.headers))
    }

    /// Builds a request to the API's own address. No other address ever gets a token.
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
        // A sensitive header is left out of debug output.
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

    /// Joins the API's address and a path. A GitHub Enterprise server has its GraphQL API beside the REST API's path.
    fn absolute_uri(&self, path: &str) -> Result<Uri, http::Error> {
        let url = &self.config.url;
        let base = url.path().trim_end_matches('/');
        // `/api/v3` is the path of the REST API there, and `/api/graphql` the path of the GraphQL API.
        let beside = base.strip_suffix("/v3").filter(|_| path == GRAPHQL_PATH);
        let mut parts = url.clone().into_parts();
        parts.path_and_query = Some(format!("{}{path}", beside.unwrap_or(base)).parse()?);
        Ok(Uri::from_parts(parts)?)
    }
}

impl fmt::Debug for GithubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GithubClient").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Formats the API's address.
impl fmt::Display for GithubClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.config.url)
    }
}

/// Returns the path below a repository. The owner and the name have only characters that a URL allows.
pub(super) fn repository_path(repository: &HostedRepository, rest: &str) -> String {
    format!("/repos/{}/{}{rest}", repository.owner(), repository.name())
}

/// Returns true if a part of a `Link` header says that its address is the next page: `rel="next"`.
fn is_next_relation(part: &str) -> bool {
    let relation = part.trim().strip_prefix("rel=").unwrap_or_default();
    relation.trim_matches('"').split(' ').any(|name| name.eq_ignore_ascii_case("next"))
}

/// Returns the reason why an answer has begun and not ended.
fn broken_response_message(error: &(dyn std::error::Error + Send + Sync + 'static)) -> String {
    if error.is::<LengthLimitError>() {
        return format!("its answer is longer than {} MiB", MAX_RESPONSE_BYTES >> 20);
    }
    format!("its answer broke off ({})", transport::root_cause(error))
}

/// Makes an error for a request that could not be built. A repository's name that no URL can have is the only known
/// cause.
fn invalid_request_error(error: impl fmt::Display) -> GithubError {
    GithubError::NoResponse(format!(
        "it cannot be asked for this ({error}); check the repository's URL"
    ))
}

/// The path of the GraphQL API.
const GRAPHQL_PATH: &str = "/graphql";

/// The version of the REST API that the calls are written for.
const API_VERSION: &str = "2022-11-28";

/// The name of this program in requests. GitHub requires one.
const USER_AGENT_VALUE: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// The longest answer in bytes. A page of pull requests has some hundred KiB, most of it URLs. Our choice.
const MAX_RESPONSE_BYTES: usize = 4 << 20;

//! TLS settings from PEM files: the authorities to trust, and the certificate and key of a server.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{
    NoServerSessionStorage, ResolvesServerCert, VerifierBuilderError, WebPkiClientVerifier,
};
use rustls::{RootCertStore, ServerConfig};

/// The files of a TLS server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsFiles<'a> {
    /// The server's certificate, and the certificates between it and an authority.
    pub certificate: &'a Path,
    pub key: &'a Path,
    /// The authorities for client certificates. If it is given, each client must show a certificate of one of them.
    pub client_authorities: Option<&'a Path>,
}

/// An error for a TLS file that cannot be used. No error shows the content of a key file.
#[derive(Debug, thiserror::Error)]
pub enum TlsFileError {
    #[error("`{}` cannot be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("`{}` is not PEM: {why}", path.display())]
    Pem { path: PathBuf, why: String },
    #[error("`{}` holds no {what}", path.display())]
    Empty { path: PathBuf, what: &'static str },
    #[error("`{}` holds a bad certificate", path.display())]
    Certificate { path: PathBuf, source: rustls::Error },
    #[error("`{}` and `{}` do not belong together", certificate.display(), key.display())]
    KeyMismatch { certificate: PathBuf, key: PathBuf, source: rustls::Error },
    #[error("`{}` has no CA certificate that client certificates can be verified with", path.display())]
    ClientAuthorities { path: PathBuf, source: VerifierBuilderError },
}

/// Returns the server configuration for TLS 1.2 or later with HTTP/2 or HTTP/1.1.
///
/// # Errors
/// Returns the error of the first file that cannot be used.
pub fn server_config(files: &TlsFiles<'_>) -> Result<Arc<ServerConfig>, TlsFileError> {
    let chain = load_certificates(files.certificate)?;
    let key = load_private_key(files.key)?;
    let builder = ServerConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()
        .expect("the provider speaks TLS 1.2 and 1.3");
    let builder =
        match files.client_authorities {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let roots = Arc::new(load_root_store(path)?);
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(roots, crypto_provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|source| {
                    TlsFileError::ClientAuthorities { path: path.into(), source }
                })?)
            }
        };
    let mut config =
        builder.with_single_cert(chain, key).map_err(|source| TlsFileError::KeyMismatch {
            certificate: files.certificate.into(),
            key: files.key.into(),
            source,
        })?;
    config.alpn_protocols = vec![ALPN_HTTP2.to_vec(), ALPN_HTTP1.to_vec()];
    Ok(Arc::new(config))
}

/// Reads the authorities in a PEM file.
///
/// # Errors
/// Returns an error if the file cannot be read, has no certificate, or has an invalid certificate.
pub fn load_root_store(path: &Path) -> Result<RootCertStore, TlsFileError> {
    let mut roots = RootCertStore::empty();
    for certificate in load_certificates(path)? {
        let added = roots.add(certificate);
        added.map_err(|source| TlsFileError::Certificate { path: path.into(), source })?;
    }
    Ok(roots)
}

fn load_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let found = CertificateDer::pem_reader_iter(open_file(path)?);
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|error| pem_error(path, &error))?;
    if found.is_empty() {
        return Err(TlsFileError::Empty { path: path.into(), what: "certificate" });
    }
    Ok(found)
}

fn load_private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsFileError> {
    PrivateKeyDer::from_pem_reader(open_file(path)?).map_err(|error| match error {
        pem::Error::NoItemsFound => TlsFileError::Empty { path: path.into(), what: "private key" },
        error => pem_error(path, &error),
    })
}

fn open_file(path: &Path) -> Result<BufReader<File>, TlsFileError> {
    let file =
        File::open(path).map_err(|source| TlsFileError::Read { path: path.into(), source })?;
    Ok(BufReader::new(file))
}

fn pem_error(path: &Path, error: &pem::Error) -> TlsFileError {
    TlsFileError::Pem { path: path.into(), why: error.to_string() }
}

/// Returns the server configuration for TLS 1.2 or later with HTTP/1.1 only, and with the certificate that `resolver`
/// chooses. The server keeps no sessions, so each connection shows the certificate anew and holds no memory afterwards.
pub fn http1_server_config(resolver: Arc<dyn ResolvesServerCert>) -> Arc<ServerConfig> {
    let mut config = ServerConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()
        .expect("the provider speaks TLS 1.2 and 1.3")
        .with_no_client_auth()
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![ALPN_HTTP1.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Arc::new(config)
}

/// Returns the provider `ring`. It is named because a process may link more than one provider.
fn crypto_provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The name of HTTP/2 in ALPN (RFC 9113, section 3.1).
pub const ALPN_HTTP2: &[u8] = b"h2";

/// The name of HTTP/1.1 in ALPN (RFC 7301, section 6).
const ALPN_HTTP1: &[u8] = b"http/1.1";

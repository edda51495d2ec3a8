{{- /* What stands before every name, so that several releases fit one namespace. */ -}}
{{- define "tokenloom.prefix" }}
{{- if kindIs "invalid" .Values.prefix }}
{{- if ne .Release.Name .Chart.Name }}{{ .Release.Name }}-{{ end }}
{{- else }}{{ .Values.prefix }}{{ end }}
{{- end -}}
{{- /* The text of a value. YAML reads 30 and true as a number and a boolean, and Kubernetes refuses them in a ConfigMap.
Go prints the number 1000000 of a values file as 1e+06; JSON keeps its digits. */ -}}
{{- define "tokenloom.text" }}
{{- if or (kindIs "map" .value) (kindIs "slice" .value) (kindIs "invalid" .value) }}
{{- fail (printf "%s is %s; it takes a text, a number or a boolean" .name (toJson .value)) }}
{{- end }}
{{- if kindIs "string" .value }}{{ .value }}{{ else }}{{ toJson .value }}{{ end }}
{{- end -}}
{{- /* Adds the keys of all .layers to .on; a later layer wins, key by key also in `settings`. Not by `merge`, for which
false, 0 and an empty text are keys that are not set. */ -}}
{{- define "tokenloom.lay" }}
{{- $on := .on }}
{{- range .layers }}
{{- range $key, $value := . | default dict }}
{{- if eq $key "settings" }}
{{- $settings := dict }}
{{- $_ := include "tokenloom.lay" (dict "on" $settings "layers" (list (get $on $key | default dict) $value)) }}
{{- $_ := set $on $key $settings }}
{{- else }}{{ $_ := set $on $key $value }}{{ end }}
{{- end }}
{{- end }}
{{- end -}}
{{- /* Appends a pool for each model to .pools: what its mesh is made of. Without `models` there is one, which has the
values of the chart; what a model does not set is as in the chart's values too. */ -}}
{{- define "tokenloom.pools" }}
{{- $values := .root.Values }}
{{- $prefix := include "tokenloom.prefix" .root }}
{{- $pools := list }}
{{- $taken := list }}
{{- range $model := $values.models | default (list dict) }}
{{- $pool := dict "name" (get $model "name" | default "") "model" (get $model "model" | default $values.model) }}
{{- $own := ternary (printf "%s%s-" $prefix $pool.name) $prefix (ne $pool.name "") }}
{{- if and $values.models (gt (len $own) 38) }}
{{- fail (printf "models: %s: names of objects would begin with %s, which is longer than 38 characters; choose a shorter name or prefix" $pool.name $own) }}
{{- end }}
{{- $_ := set $pool "prefix" $own }}
{{- $_ := set $pool "served" (get $model "servedNames" | default (list $pool.name)) }}
{{- range $pool.served }}
{{- if has . $taken }}{{ fail (printf "models: two of them would be called %s" .) }}{{ end }}
{{- $taken = append $taken . }}
{{- end }}
{{- $_ := set $pool "overlay" (get $model "overlay" | default $values.overlay) }}
{{- $_ := set $pool "components" (concat $values.components (get $model "components" | default list) | uniq) }}
{{- if has "engine-pool" $pool.components }}
{{- if $values.models }}{{ fail "the component engine-pool takes one model: its route leads to the engines of all" }}{{ end }}
{{- if has "scale-to-zero" $pool.components }}{{ fail "the component engine-pool has no endpoint for requests while there are no engines; leave out scale-to-zero" }}{{ end }}
{{- end }}
{{- $_ := set $pool "settings" dict }}
{{- $_ := include "tokenloom.lay" (dict "on" $pool.settings "layers" (list $values.settings (get $model "settings"))) }}
{{- $_ := set $pool "objects" (get $model "objects" | default dict) }}
{{- range $role := list "engines" "prefill" "decode" }}
{{- $wanted := dict }}
{{- $_ := include "tokenloom.lay" (dict "on" $wanted "layers" (list (get $values $role) (get $model $role))) }}
{{- $_ := set $pool $role $wanted }}
{{- end }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- $_ := set . "pools" $pools }}
{{- end -}}
{{- /* Sets in .lines the objects of an overlay with components as they are in files/: each as its line, by its kind and
its name in k8s/. A component replaces the objects that it changes. */ -}}
{{- define "tokenloom.lines" }}
{{- $here := . }}
{{- $files := list (printf "files/%s.jsonl" .overlay) }}
{{- if not (.root.Files.Get (first $files)) }}{{ fail (printf "there is no overlay %q" .overlay) }}{{ end }}
{{- range .components }}
{{- $both := list (printf "files/%s.jsonl" .) (printf "files/%s+%s.jsonl" $here.overlay .) }}
{{- if not (or ($here.root.Files.Get (first $both)) ($here.root.Files.Get (last $both))) }}
{{- fail (printf "there is no component %q for the overlay %q" . $here.overlay) }}
{{- end }}
{{- $files = concat $files $both }}
{{- end }}
{{- range $first := .components }}
{{- range $here.components }}
{{- $files = concat $files (list (printf "files/%s+%s.jsonl" $first .) (printf "files/%s+%s+%s.jsonl" $here.overlay $first .)) }}
{{- end }}
{{- end }}
{{- range $file := $files }}
{{- range $line := compact (splitList "\n" ($here.root.Files.Get $file)) }}
{{- $object := fromJson $line }}
{{- /* A mark, until names have their prefix: the namespace may be called as an object is. */}}
{{- $line = $line | replace "namespace=\\\"tokenloom\\\"" "namespace=\\\"@namespace@\\\"" }}
{{- $_ := set $here.lines (printf "%s/%s" $object.kind $object.metadata.name) $line }}
{{- end }}
{{- end }}
{{- end -}}
{{- /* The names that .lines give, as an alternative of a pattern. */ -}}
{{- define "tokenloom.names" }}
{{- $names := list }}
{{- range .lines }}
{{- $object := fromJson . }}
{{- $names = append $names $object.metadata.name }}
{{- if eq $object.kind "Certificate" }}{{ $names = append $names $object.spec.secretName }}{{ end }}
{{- end }}
{{- join "|" (uniq $names | sortAlpha) }}
{{- end -}}
{{- /* A line in which the .names have the .prefix wherever they stand as a whole: as names, labels, hosts, and in queries.
Keys stay as they are. */ -}}
{{- define "tokenloom.prefixed" }}
{{- if and .prefix .names }}
{{- $named := printf "(\"|///|=|kubernetes:|\\\\\")(%s)(\"[],}]|:50051|\\\\\")" .names }}
{{- regexReplaceAll $named .line (printf "${1}%s${2}${3}" .prefix) }}
{{- else }}{{ .line }}{{ end }}
{{- end -}}
{{- /* Whether .key names an object that all models share: what clients reach, and what a release has once. */ -}}
{{- define "tokenloom.isShared" }}
{{- $kind := splitList "/" .key | first }}
{{- $shared := list "Deployment/gateway" "Service/gateway" "HorizontalPodAutoscaler/gateway" "PodDisruptionBudget/gateway" "ServiceAccount/gateway" "ConfigMap/tokenloom-hub" "PersistentVolumeClaim/models" "HTTPRoute/gateway" "GRPCRoute/gateway" "InferencePool/gateway" "ServiceMonitor/gateway" }}
{{- if or (has .key $shared) (has $kind (list "Certificate" "Issuer")) }}yes{{ end }}
{{- end -}}
{{- /* Gives the engines of a pool their numbers, resources and settings. .key: the object's kind and name in k8s/. */ -}}
{{- define "tokenloom.engines" }}
{{- $name := splitList "/" .key | last }}
{{- if or (eq $name "engine") (hasPrefix "engine-" $name) }}
{{- $role := trimPrefix "engine" $name | trimPrefix "-" }}
{{- $wanted := dict }}
{{- $_ := include "tokenloom.lay" (dict "on" $wanted "layers" (list .pool.engines (get .pool $role))) }}
{{- $scaled := dict "HorizontalPodAutoscaler" (list "minReplicas" "maxReplicas") "ScaledObject" (list "minReplicaCount" "maxReplicaCount") }}
{{- with get $scaled .object.kind }}
{{- $spec := $.object.spec }}
{{- if hasKey $wanted "min" }}{{ $_ := set $spec (first .) (int $wanted.min) }}{{ end }}
{{- if hasKey $wanted "max" }}{{ $_ := set $spec (last .) (int $wanted.max) }}{{ end }}
{{- $least := get $spec (first .) | int }}
{{- if gt $least (get $spec (last .) | int) }}
{{- fail (printf "%s: at least %d engines, but at most %d" $.key $least (get $spec (last .) | int)) }}
{{- end }}
{{- if and (eq $least 0) (not (has "scale-to-zero" $.pool.components)) }}
{{- fail (printf "%s: at least 0 engines needs the component scale-to-zero" $.key) }}
{{- end }}
{{- end }}
{{- if eq .object.kind "StatefulSet" }}
{{- $container := first .object.spec.template.spec.containers }}
{{- with $wanted.resources }}{{ $_ := set $container "resources" (deepCopy .) }}{{ end }}
{{- $env := list }}
{{- range $container.env }}{{ if not (hasKey ($wanted.settings | default dict) .name) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- range $setting, $value := $wanted.settings }}
{{- $env = append $env (dict "name" $setting "value" (include "tokenloom.text" (dict "name" $setting "value" $value))) }}
{{- end }}
{{- $_ := set $container "env" $env }}
{{- end }}
{{- end }}
{{- end -}}
{{- /* Leads the gateways to the meshes of all .pools: its options describe the first mesh, a file the others. */ -}}
{{- define "tokenloom.gateway" }}
{{- $meshes := list }}
{{- range .pools }}
{{- $meshes = append $meshes (dict "served_model_name" .served "tokenizers" (list (printf "dns:///%stokenizer:50051" .prefix)) "output_processors" (list (printf "dns:///%soutput-processor:50051" .prefix)) "coordinator" (printf "%scoordinator:50051" .prefix)) }}
{{- end }}
{{- $first := first $meshes }}
{{- $own := dict "TOKENLOOM_SERVED_MODEL_NAME" (join "," $first.served_model_name) "TOKENLOOM_TOKENIZERS" (first $first.tokenizers) "TOKENLOOM_OUTPUT_PROCESSORS" (first $first.output_processors) "TOKENLOOM_COORDINATOR" $first.coordinator }}
{{- $template := .object.spec.template }}
{{- $container := first $template.spec.containers }}
{{- with rest $meshes }}
{{- $_ := set $own "TOKENLOOM_MESHES" "/etc/tokenloom/meshes/meshes.json" }}
{{- $file := toJson (dict "mesh" .) }}
{{- $name := printf "%sgateway-meshes" $.prefix }}
{{- $_ := set $.objects "ConfigMap/gateway-meshes" (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" (dict "name" $name "labels" $.object.metadata.labels) "data" (dict "meshes.json" $file)) }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts (dict "name" "meshes" "mountPath" "/etc/tokenloom/meshes" "readOnly" true)) }}
{{- $_ := set $template.spec "volumes" (append $template.spec.volumes (dict "name" "meshes" "configMap" (dict "name" $name))) }}
{{- /* A gateway reads the file when it starts: other models need other pods. */}}
{{- $_ := set $template.metadata "annotations" (merge (dict "checksum/meshes" (sha256sum $file)) ($template.metadata.annotations | default dict)) }}
{{- end }}
{{- $env := list }}
{{- range $container.env }}{{ if not (hasKey $own .name) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- range $name, $value := $own }}{{ $env = append $env (dict "name" $name "value" $value) }}{{ end }}
{{- $_ := set $container "env" $env }}
{{- end -}}
